"""The norm of a model's gradient over all its shards, accurate however they are cut."""

import torch
import torch.distributed as dist

from megarlhf import device

_ROW_ELEMENTS = 2**12
"""Squares that are added in float32."""


@torch.no_grad()
def gradient_norm(optimizer, group: dist.ProcessGroup) -> float:
    """sqrt(sum of squares) of the main gradients that a ChainedOptimizer steps. Collective over `group`, all shards.

    megarlhf sums in pieces of float32 and adds these in float64: torch's float32 norm on CPUs, which megatron-core
    would use, is 0.15 % too small for a matrix of 28 million elements, by an error that depends on the layout.
    Weights that several ranks hold count once.
    """
    total = torch.zeros((), dtype=torch.float64, device=device.current())
    for part in optimizer.chained_optimizers:
        for gradient in device.gradients_for_norm(part):
            flat = gradient.view(-1)
            whole = flat[: len(flat) // _ROW_ELEMENTS * _ROW_ELEMENTS].view(-1, _ROW_ELEMENTS)
            total += torch.linalg.vector_norm(whole, dim=1, dtype=torch.float32).double().square().sum()
            total += flat[whole.numel() :].double().square().sum()
    dist.all_reduce(total, group=group)
    return float(total.sqrt())
