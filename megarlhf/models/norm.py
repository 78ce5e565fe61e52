"""RMSNorm for local execution: torch's, with the epsilon of the config, usable under sequence parallelism."""

import torch
from megatron.core.transformer import TransformerConfig

from megarlhf import device


class RMSNorm(torch.nn.RMSNorm):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    megatron-core's own wrapper of torch's norm refuses sequence parallelism. All it takes is a mark on the weight: a
    tensor rank sees 1/tp of the tokens, so megatron-core must sum this gradient over them.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device.current())
        self.weight.sequence_parallel = config.sequence_parallel
