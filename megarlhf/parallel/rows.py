"""Rows over data-parallel ranks: who works on which, and bringing results of unequal length back to everyone."""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf import device

_DTYPES = (torch.float32, torch.int32, torch.int64)
"""Of values that can be gathered."""


def share(lengths: Sequence[int], dp: int) -> list[list[int]]:
    """Rows for each of `dp` ranks, balanced by tokens; each row in exactly one list, lists ascending.

    Longest row first, each to the rank with the fewest tokens so far (ties: fewest rows, then lowest rank), so the
    result is a function of the arguments alone and the heaviest rank carries at most one row more than the mean.
    """
    loads = [(0, 0, rank) for rank in range(dp)]
    heapify(loads)
    rows: list[list[int]] = [[] for _ in range(dp)]
    for row in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        tokens, count, rank = loads[0]
        heapreplace(loads, (tokens + lengths[row], count + 1, rank))
        rows[rank].append(row)
    return [sorted(mine) for mine in rows]


@device.labelled("communicate")
def gather_rows(
    rows: Sequence[int], lengths: Sequence[int], values: Tensor, num_rows: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """All rows on every rank, from the rows that each rank of `group` holds. Collective over `group`.

    rows: numbers in 0..num_rows-1 that this rank contributes, in any order; lengths: values of each (also 0); values:
    [n], theirs end to end in that order, of one dtype (float32, int32 or int64) on all ranks, those without rows
    included. Returns (the values of all rows end to end, by number; how many each row has, [num_rows] int64), on the
    CPU. Exact: bytes are moved, nothing is summed, and no object is made of a value.

    Raises ValueError on every rank alike when a row is missing, contributed twice, out of range, or when dtypes differ.
    """
    if len(rows) != len(lengths) or sum(lengths) != len(values):
        raise ValueError(f"{len(rows)} rows with {len(lengths)} lengths of {sum(lengths)} values, not {len(values)}")
    sizes = torch.stack(gather_alike(torch.tensor([len(rows), len(values), _DTYPES.index(values.dtype)]), group))
    if len(sizes[:, 2].unique()) > 1:
        raise ValueError(f"rows of several dtypes: {sorted({str(_DTYPES[code]) for code in sizes[:, 2].tolist()})}")
    owned, counts = _joined(torch.tensor([list(rows), list(lengths)], dtype=torch.int64), sizes[:, 0], group)
    _check(owned, num_rows)
    order = owned.argsort()
    everything = _joined(values, sizes[:, 1], group)
    return _in_order(everything, counts, order), counts[order]


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, by rank; what pickle can take. Collective over `group`, the world where it is not given."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@device.labelled("communicate")
def gather_alike(value: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Each rank's tensor, of one shape and dtype, on the CPU, by rank. Collective over `group`, or the world."""
    value = value.to(device.current()).contiguous()
    everyone = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, value, group=group)
    return [one.cpu() for one in everyone]


def _joined(values: Tensor, sizes: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Each rank's values [..., n] one after another, where rank r has sizes[r]. Collective over `group`."""
    if not int(sizes.max()):
        return values.cpu()
    padded = torch.nn.functional.pad(values, (0, int(sizes.max()) - values.shape[-1]))
    pieces = gather_alike(padded, group)
    return torch.cat([piece[..., :size] for piece, size in zip(pieces, sizes.tolist(), strict=True)], -1)


def _in_order(values: Tensor, counts: Tensor, order: Tensor) -> Tensor:
    """[n]: pieces of `counts` values put in another order."""
    if len(counts) and bool((counts == counts[0]).all()):
        return values.view(len(counts), int(counts[0])).index_select(0, order).flatten()
    pieces = values.split(counts.tolist())
    return torch.cat([pieces[place] for place in order.tolist()]) if pieces else values


def _check(contributed: Tensor, num_rows: int) -> None:
    """Every row exactly once; `contributed` is the same on all ranks, so all of them fail together."""
    is_inside = (contributed >= 0) & (contributed < num_rows)
    counts = contributed[is_inside].bincount(minlength=num_rows)
    outside = contributed[~is_inside].unique().tolist()
    missing, twice = ((counts == 0).nonzero()[:, 0].tolist(), (counts > 1).nonzero()[:, 0].tolist())
    if outside or twice or missing:
        raise ValueError(f"rows of {num_rows}: missing {missing}, contributed twice {twice}, out of range {outside}")
