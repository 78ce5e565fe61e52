"""The value head of critics and reward models: a float32 number per position and label."""

import torch
from torch import Tensor

from megarlhf import device


class ValueHead(torch.nn.Linear):
    """Linear(H, K) for K labels, float32 whatever the model's precision, the same on every tensor rank; zero at first.

    Every tensor rank computes all positions, so its gradient is whole on each and is not summed over them.
    """

    def __init__(self, hidden_size: int, num_labels: int = 1, *, has_bias: bool = False):
        super().__init__(hidden_size, num_labels, bias=has_bias, dtype=torch.float32, device=device.current())
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [M, H] of any precision -> values [M] float32; [M, K] with K > 1 labels."""
        found = super().forward(hidden.float())
        return found.squeeze(-1) if self.out_features == 1 else found
