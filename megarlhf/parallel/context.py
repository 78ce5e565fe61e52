"""Context parallelism: a stream of N packed tokens cut over cp ranks, and what brings its parts together again.

The stream is cut into 2 * cp equal slices, of which rank r holds the r-th and the r-th from the end: later tokens see
more than earlier ones, so that the ranks have about equal work. Rows may be cut anywhere.
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megarlhf.config.layout import Layout


def stream_multiple(layout: Layout) -> int:
    """What the length of a stream must be a multiple of, so that every rank has equal shares of it."""
    slices = 2 * layout.cp if layout.cp > 1 else 1
    return slices * (layout.tp if layout.sp else 1)


def held_slices(num_tokens: int, cp: int, rank: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) in the stream of each slice that context rank `rank` of `cp` holds, ascending."""
    if cp == 1:
        return ((0, num_tokens),)
    assert num_tokens % (2 * cp) == 0, f"a stream of {num_tokens} tokens is not padded to a multiple of {2 * cp}"
    size = num_tokens // (2 * cp)
    return tuple((index * size, (index + 1) * size) for index in (rank, 2 * cp - 1 - rank))


def held_tokens(num_tokens: int, cp: int, rank: int) -> Tensor:
    """[N/cp] int64 on the host: places in the stream of the tokens that a rank holds, in its order."""
    return torch.cat([torch.arange(start, stop) for start, stop in held_slices(num_tokens, cp, rank)])


def whole_stream(held: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All tokens [N, ...] in the order of the stream, from each rank's [N/cp, ...]. Collective over `group`, cp.

    Differentiable: each rank gets the sum of all ranks' gradients for the tokens that it holds.
    """
    cp, num_tokens = group.size(), held.shape[0] * group.size()
    order = torch.cat([held_tokens(num_tokens, cp, rank) for rank in range(cp)]).argsort()
    gathered = gather_from_sequence_parallel_region(held.contiguous(), tensor_parallel_output_grad=True, group=group)
    return gathered[order.to(held.device)]


def places_here(positions: Tensor, num_tokens: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Of `positions` [M] in the stream: (which of them this rank holds [m], their places in its part [m])."""
    held = held_tokens(num_tokens, group.size(), group.rank()).to(positions.device)
    place = torch.full((num_tokens,), -1, dtype=torch.int64, device=positions.device)
    place[held] = torch.arange(len(held), device=positions.device)
    mine = (place[positions] >= 0).nonzero()[:, 0]
    return mine, place[positions[mine]]


def joined(values: Tensor, mine: Tensor, num_values: int, group: dist.ProcessGroup) -> Tensor:
    """[M, ...] on every rank, from each rank's `values` [m, ...] of entries `mine` [m]. Collective over `group`, cp.

    Each entry comes from one rank. What is computed from the result is the same on all ranks, so the gradient of
    `values` is that of their own entries: it is not summed.
    """
    return _Joined.apply(values, mine, num_values, group)


class _Joined(torch.autograd.Function):
    """Scattered into zeros and summed; backward, this rank's own entries."""

    @staticmethod
    def forward(ctx, values, mine, num_values, group):
        ctx.save_for_backward(mine)
        whole = values.new_zeros(num_values, *values.shape[1:])
        whole[mine] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        (mine,) = ctx.saved_tensors
        return gradient[mine], None, None, None
