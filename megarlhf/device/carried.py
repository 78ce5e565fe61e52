"""torch's collectives over groups whose ranks have a quicker way to each other than the backend's."""

import functools
from typing import Protocol

import torch
import torch.distributed as dist


class Carrier(Protocol):
    """Does for one group what torch's collective of the same name does, at once. Collective over the group."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """`tensor`, of floating-point numbers, becomes the sum of all ranks'."""

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> None:
        """`output` becomes all ranks' parts, one after the other."""

    def reduce_scatter(self, output: torch.Tensor, whole: torch.Tensor) -> None:
        """`output` becomes this rank's part of the sum of all ranks' `whole`, of floating-point numbers."""


class Done:
    """What an operation that was asked for without waiting returns here: it has been done."""

    def wait(self, timeout=None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


_carriers: dict[dist.ProcessGroup, Carrier] = {}


def carry(group: dist.ProcessGroup, carrier: Carrier) -> None:
    """From now on the collectives that a Carrier has are its own over `group`, on a machine without a GPU.

    All ranks of the group say so at the same point. Sums of whole numbers, maxima and the rest stay the backend's.
    """
    _carriers[group] = carrier


def patch() -> None:
    """Replace the functions in torch.distributed, once, before megatron.core is imported and binds them."""
    reduce, gather, scatter = dist.all_reduce, dist.all_gather_into_tensor, dist.reduce_scatter_tensor

    @functools.wraps(reduce)
    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        carrier = _carriers.get(group)
        if carrier is None or op != dist.ReduceOp.SUM or not tensor.is_floating_point():
            return reduce(tensor, op, group, async_op)
        carrier.all_reduce(tensor)
        return Done() if async_op else None

    @functools.wraps(gather)
    def all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False):
        carrier = _carriers.get(group)
        if carrier is None:
            return gather(output_tensor, input_tensor, group, async_op)
        carrier.all_gather(output_tensor, input_tensor)
        return Done() if async_op else None

    @functools.wraps(scatter)
    def reduce_scatter_tensor(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
        carrier = _carriers.get(group)
        if carrier is None or op != dist.ReduceOp.SUM or not input.is_floating_point():
            return scatter(output, input, op, group, async_op)
        carrier.reduce_scatter(output, input)
        return Done() if async_op else None

    dist.all_reduce = all_reduce
    dist.all_gather_into_tensor = all_gather_into_tensor
    dist.reduce_scatter_tensor = reduce_scatter_tensor
