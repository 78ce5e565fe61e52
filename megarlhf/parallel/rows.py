"""Rows of a batch over ranks: who works on which, and bringing the results back to everyone in input order."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def share(lengths: Sequence[int], dp: int) -> list[list[int]]:
    """Rows for each of `dp` ranks, about equally many tokens each: longest first to the least loaded. Deterministic."""
    shares: list[list[int]] = [[] for _ in range(dp)]
    load = [(0, rank) for rank in range(dp)]
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        tokens, rank = min(load)
        load[rank] = (tokens + lengths[row], rank)
        shares[rank].append(row)
    return [sorted(rows) for rows in shares]


def gather_rows(
    rows: Sequence[int], values: Sequence[torch.Tensor], num_rows: int, group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Every row's values, on the host of every rank, in row order. Collective over `group`: one ragged all-gather.

    `values[i]` [any length] belongs to row `rows[i]`; float32 or int64, the same on all ranks. Each of the `num_rows`
    rows comes from exactly one rank. Raises ValueError, on every rank, when one is missing or comes twice.
    """
    gathered: list = [None] * dist.get_world_size(group)
    mine = (list(rows), [value.cpu() for value in values])
    dist.all_gather_object(gathered, mine, group=group)
    found: dict[int, torch.Tensor] = {}
    for part, tensors in gathered:
        for row, tensor in zip(part, tensors, strict=True):
            if row in found:
                raise ValueError(f"row {row} comes from two ranks")
            found[row] = tensor
    missing = [row for row in range(num_rows) if row not in found]
    if missing or len(found) != num_rows:
        raise ValueError(f"rows {missing} come from no rank; {len(found)} of {num_rows} came")
    return [found[row] for row in range(num_rows)]
