"""What the layers multiply by on a CPU, where memory is slow beside arithmetic: oneDNN's products where they are the
quicker ones, and weight gradients that are added to the learner's sum by the product that makes them.

Left to autograd, every micro-batch writes each weight's gradient to memory of its own and adds it afterwards; of the
embedding it writes all rows, of which a few hundred are not zero. On GPUs megatron-core's own functions are used, with
apex's kernel for the same purpose where it is installed.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import dist_all_gather_func, dist_reduce_scatter_func
from torch import Tensor

from megarlhf import device


def use_host_products(chunk: torch.nn.Module) -> None:
    """Have the linears and the embedding of a chunk compute as this module says.

    `_forward_impl` is the one seam of megatron-core's linears, the same in both versions; parameters stay what they
    are. Without the learner's buffers gradients go to autograd as ever.
    """
    for part in chunk.modules():
        if isinstance(part, ColumnParallelLinear | RowParallelLinear):
            part._forward_impl = linear
        elif isinstance(part, VocabParallelEmbedding):
            part.forward = partial(_look_up, part)


def _sum_of_gradients(weight: Tensor) -> Tensor | None:
    return getattr(weight, "main_grad", None)  # megatron-core's name, set once the weight is trained


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    sequence_parallel: bool = False,
    allreduce_dgrad: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    **_of_fused_kernels: Any,
) -> Tensor:
    """input [S, B, columns] -> [S, B, rows]. Communicates over tp_group as megatron-core's function does: the input
    [S/tp, B, columns] is gathered with `sequence_parallel`, and its gradient summed with either; the weight's gradient
    is computed meanwhile."""
    gathers, sums = (tp_group if is_asked else None for is_asked in (sequence_parallel, allreduce_dgrad))
    return _Linear.apply(input, weight, bias, gathers, sums)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gathers: Any, sums: Any) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.gathers, ctx.sums, ctx.total = gathers, sums, _sum_of_gradients(weight)
        if gathers is not None:
            x, _ = _gathered(x, gathers)
        return device.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (_, wants_weight, wants_bias, _, _) = ctx.saved_tensors, ctx.needs_input_grad
        gathering = exchange = None
        if wants_weight and ctx.gathers is not None:
            x, gathering = _gathered(x, ctx.gathers, is_awaited=False)
        to_x = device.linear(slope, weight.t())
        if gathering is not None:
            gathering.wait()
        if ctx.gathers is not None:
            partial_sums, shape = to_x, (len(to_x) // ctx.gathers.size(), *to_x.shape[1:])
            to_x = to_x.new_empty(shape)
            exchange = dist_reduce_scatter_func(to_x, partial_sums, group=ctx.gathers, async_op=True)
        elif ctx.sums is not None:
            exchange = dist.all_reduce(to_x, group=ctx.sums, async_op=True)
        slope = slope.reshape(-1, slope.shape[-1])
        to_weight = _weight_gradient(slope, x.reshape(-1, x.shape[-1]), ctx.total) if wants_weight else None
        to_bias = slope.sum(0) if wants_bias else None
        if exchange is not None:
            exchange.wait()
        return to_x, to_weight, to_bias, None, None


def _weight_gradient(slope: Tensor, x: Tensor, total: Tensor | None) -> Tensor | None:
    """Of slope [N, rows] and x [N, columns]: added to `total` [rows, columns] float32, or for autograd."""
    if total is None:
        return slope.t() @ x
    device.add_matmul_(total, slope.t(), x)
    return None


def _gathered(x: Tensor, group: dist.ProcessGroup, *, is_awaited: bool = True) -> tuple[Tensor, Any]:
    """([S/tp, B, H] of every rank as [S, B, H], what to wait for). Collective over `group`."""
    whole = x.new_empty(len(x) * group.size(), *x.shape[1:])
    return whole, dist_all_gather_func(whole, x.contiguous(), group=group, async_op=not is_awaited)


def _look_up(embedding: VocabParallelEmbedding, ids: Tensor) -> Tensor:
    """`embedding.forward`: ids [B, S] -> [B, S, H], or [S/tp, B, H] with sequence parallelism. Communicates over tp."""
    group, weight = embedding.tp_group, embedding.weight
    is_elsewhere = (ids < embedding.vocab_start_index) | (ids >= embedding.vocab_end_index)
    if group.size() > 1:
        ids = (ids - embedding.vocab_start_index).masked_fill(is_elsewhere, 0)
    total = _sum_of_gradients(weight)
    found = F.embedding(ids, weight) if total is None else _Rows.apply(weight, ids, total)
    if group.size() > 1:
        found = found.masked_fill(is_elsewhere[..., None], 0.0)
    if embedding.reduce_scatter_embeddings:
        return reduce_scatter_to_sequence_parallel_region(found.transpose(0, 1).contiguous(), group=group)
    return reduce_from_tensor_model_parallel_region(found, group=group)


class _Rows(torch.autograd.Function):
    """weight[ids], whose gradient is added to `total` [V, H] float32 row by row, in the order of `ids`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.total = total
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            ctx.total.index_add_(0, ids.flatten(), slope.flatten(0, -2).to(ctx.total.dtype))
        return None, None, None
