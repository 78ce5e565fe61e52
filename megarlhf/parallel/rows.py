"""Rows over data-parallel ranks: who works on which, and bringing results of unequal length back to everyone."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megarlhf import device


def share(lengths: Sequence[int], dp: int) -> list[list[int]]:
    """Rows for each of `dp` ranks, balanced by tokens; each row in exactly one list, lists ascending.

    Longest row first, each to the rank with the fewest tokens so far (ties: fewest rows, then lowest rank), so the
    result is a function of the arguments alone and the heaviest rank carries at most one row more than the mean.
    """
    loads = [(0, 0)] * dp
    rows: list[list[int]] = [[] for _ in range(dp)]
    for row in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        rank = min(range(dp), key=lambda index: (*loads[index], index))
        tokens, count = loads[rank]
        loads[rank] = (tokens + lengths[row], count + 1)
        rows[rank].append(row)
    return [sorted(mine) for mine in rows]


@device.labelled("communicate")
def gather_rows(
    rows: Sequence[int], values: Sequence[torch.Tensor], num_rows: int, group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """All rows on every rank, from the rows that each rank of `group` holds. Collective over `group`.

    rows: numbers in 0..num_rows-1 that this rank contributes; values: one 1-D tensor each, of any length (also 0),
    all of one dtype. Returns `num_rows` 1-D CPU tensors, index = row. Exact: bytes are moved, nothing is summed.

    Raises ValueError on every rank alike when a row is missing, contributed twice, out of range, or when dtypes differ.
    """
    if len(rows) != len(values):
        raise ValueError(f"{len(rows)} rows with {len(values)} values")
    lengths = [len(value) for value in values]
    dtypes = {value.dtype for value in values}
    headers = gather_objects((list(rows), lengths, dtypes), group)
    _check([row for owned, _, _ in headers for row in owned], num_rows)
    all_dtypes = set().union(*(found for _, _, found in headers))
    if len(all_dtypes) > 1:
        raise ValueError(f"rows of several dtypes: {sorted(map(str, all_dtypes))}")
    if not all_dtypes:
        return []
    pieces = _all_gather_ragged(values, all_dtypes.pop(), [sum(found) for _, found, _ in headers], group)
    result: list[torch.Tensor] = [torch.empty(0)] * num_rows
    for (owned, found, _), piece in zip(headers, pieces, strict=True):
        for row, value in zip(owned, piece.split(found), strict=True):
            result[row] = value.clone()
    return result


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, by rank; what pickle can take. Collective over `group`, the world where it is not given."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _all_gather_ragged(
    values: Sequence[torch.Tensor], dtype: torch.dtype, totals: list[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Each rank's values joined, on every rank, as CPU tensors of `totals` elements. Collective over `group`."""
    padded = torch.zeros(max(totals), dtype=dtype, device=device.current())
    mine = torch.cat(
        [torch.zeros(0, dtype=dtype, device=padded.device), *(value.to(padded.device) for value in values)]
    )
    padded[: len(mine)] = mine
    everyone = [torch.empty_like(padded) for _ in totals]
    dist.all_gather(everyone, padded, group=group)
    return [piece[:total].cpu() for piece, total in zip(everyone, totals, strict=True)]


def _check(contributed: list[int], num_rows: int) -> None:
    """Every row exactly once; `contributed` is the same on all ranks, so all of them fail together."""
    outside = sorted({row for row in contributed if not 0 <= row < num_rows})
    twice = sorted(row for row, count in Counter(contributed).items() if count > 1)
    missing = sorted(set(range(num_rows)) - set(contributed))
    if outside or twice or missing:
        raise ValueError(f"rows of {num_rows}: missing {missing}, contributed twice {twice}, out of range {outside}")
