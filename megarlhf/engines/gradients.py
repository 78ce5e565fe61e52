"""A model's gradients in flat buffers, and what is done to them before the optimizer's step."""

from collections.abc import Iterable, Iterator

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from megarlhf import device
from megarlhf.models.build import Model
from megarlhf.parallel.parts import Post, gather_parts, open_post, sum_parts


class Gradients(DistributedDataParallel):
    """megatron-core's, without its collectives where a rank is the only one of its group, and with others on CPUs.

    A sum over one rank changes nothing, but would copy all gradients and all weights, and hold the copies. gloo's sums
    and copies take several times as long as those of `parallel.parts`.
    """

    def __init__(self, model: Model, chunk: torch.nn.Module):
        """`chunk` is one of the model's. Collective over the data-parallel ranks."""
        settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        collection = model.groups.collection
        super().__init__(model.config, settings, chunk, pg_collection=collection)
        self._is_alone = collection.intra_dp_cp.size() == collection.intra_expt_dp.size() == 1
        self._shared: list[tuple[Post, list]] = []
        """Posts of the groups of several ranks, and the megatron-core buffers that they sum; none on a GPU."""
        if device.is_host():
            kinds = (collection.intra_dp_cp, self.buffers), (collection.intra_expt_dp, self.expert_parallel_buffers)
            self._shared = [(open_post(group), buffers) for group, buffers in kinds if buffers and group.size() > 1]

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Sums over the data-parallel ranks; each has the sum of its part, or of all. Collective over them."""
        if not device.is_host():
            if not self._is_alone:
                super().finish_grad_sync(force_all_reduce=force_all_reduce)
            return
        for post, bucket in self._shared_buckets():
            assert bucket.gradient_scaling_factor == 1.0, "losses are divided by the whole minibatch's tokens"
            post.start()
            sum_parts(bucket.grad_data, post)
            if force_all_reduce:
                gather_parts(bucket.grad_data, post)

    def start_param_sync(self, *arguments, **options) -> None:
        """Gives every data-parallel rank the weights that the others stepped. Collective over them."""
        if not device.is_host():
            if not self._is_alone:
                super().start_param_sync(*arguments, **options)
            return
        for post, bucket in self._shared_buckets():
            post.start()
            gather_parts(bucket.param_data, post)

    def _shared_buckets(self) -> Iterator[tuple]:
        """A group's post, and a bucket of megatron-core's that its ranks share."""
        return ((post, bucket) for post, buffers in self._shared for buffer in buffers for bucket in buffer.buckets)


def clip_gradients(parameters: Iterable[torch.Tensor], max_norm: float, norm: float) -> None:
    """Scales the parameters' gradients in place by max_norm / `norm`, where that is below 1 (as megatron-core's
    clip_grad_by_total_norm_fp32, which takes a copy of each)."""
    coefficient = max_norm / (norm + 1e-6)
    if coefficient < 1.0:
        torch._foreach_mul_([one.grad for one in parameters if one.grad is not None], coefficient)
