"""The value head of critics and reward models: one float32 number per position."""

import torch
from torch import Tensor

from megarlhf import device


class ValueHead(torch.nn.Linear):
    """Linear(H, 1) without bias, float32 whatever the model's precision, the same on every tensor rank; starts at zero.

    Every tensor rank computes all positions, so its gradient is whole on each and is not summed over them.
    """

    def __init__(self, hidden_size: int):
        super().__init__(hidden_size, 1, bias=False, dtype=torch.float32, device=device.current())
        torch.nn.init.zeros_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [M, H] of any precision -> values [M] float32."""
        return super().forward(hidden.float()).squeeze(-1)
