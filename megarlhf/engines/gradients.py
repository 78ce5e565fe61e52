"""A model's gradients in flat buffers, and what is done to them before the optimizer's step."""

from collections.abc import Iterable

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from megarlhf.models.build import Model


class Gradients(DistributedDataParallel):
    """megatron-core's, without its collectives where a rank is the only one of its group.

    A sum over one rank changes nothing, but would copy all gradients and all weights, and hold the copies.
    """

    def __init__(self, model: Model, chunk: torch.nn.Module):
        """`chunk` is one of the model's."""
        settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        collection = model.groups.collection
        super().__init__(model.config, settings, chunk, pg_collection=collection)
        self.is_alone = collection.intra_dp_cp.size() == collection.intra_expt_dp.size() == 1

    def finish_grad_sync(self, *arguments, **options) -> None:
        """Sums over the data-parallel ranks. Collective over them."""
        if not self.is_alone:
            super().finish_grad_sync(*arguments, **options)

    def start_param_sync(self, *arguments, **options) -> None:
        """Gives every data-parallel rank the weights that the others stepped. Collective over them."""
        if not self.is_alone:
            super().start_param_sync(*arguments, **options)


def clip_gradients(parameters: Iterable[torch.Tensor], max_norm: float, norm: float) -> None:
    """Scales the parameters' gradients in place by max_norm / `norm`, where that is below 1 (as megatron-core's
    clip_grad_by_total_norm_fp32, which takes a copy of each)."""
    coefficient = max_norm / (norm + 1e-6)
    if coefficient < 1.0:
        torch._foreach_mul_([one.grad for one in parameters if one.grad is not None], coefficient)
