"""Rows packed into micro-batches: rows of about equal total length, laid end to end in one stream without padding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from megarlhf.records.experience import PAD, Experience

Result = TypeVar("Result")


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Share rows out over micro-batches of at most `max_tokens` tokens; a longer row is a micro-batch of its own.

    As few micro-batches as first-fit-decreasing finds, then evened out (longest row to the lightest micro-batch) where
    the cap allows. Deterministic; every row appears once; rows ascend within a micro-batch and micro-batches by their
    first row.
    """
    assert max_tokens >= 1, f"max_tokens is {max_tokens}; a micro-batch needs room for a token"
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    alone = [[row] for row in longest_first if lengths[row] >= max_tokens]
    others = [row for row in longest_first if lengths[row] < max_tokens]
    bins = _first_fit(others, lengths, max_tokens)
    even = _lightest_first(others, lengths, len(bins))
    fits = all(sum(lengths[row] for row in rows) <= max_tokens for rows in even)
    return sorted(sorted(rows) for rows in alone + (even if fits else bins))


def in_input_order(batches: Sequence[Sequence[int]], results: Sequence[Sequence[Result]]) -> list[Result]:
    """Undo `pack`: `results[i][j]` belongs to row `batches[i][j]`; the answer's index is the row."""
    rows = [row for batch in batches for row in batch]
    flat = [result for batch, part in zip(batches, results, strict=True) for _, result in zip(batch, part, strict=True)]
    assert sorted(rows) == list(range(len(rows))), f"batches do not hold every row once: {sorted(rows)}"
    return [result for _, result in sorted(zip(rows, flat, strict=True), key=lambda pair: pair[0])]


@dataclass(frozen=True)
class PackedRows:
    """Some rows of an experience, end to end: one stream of N tokens. M of its positions predict a valid token."""

    rows: tuple[int, ...]
    """Rows of the experience, in stream order."""
    input_ids: Tensor
    """[1, N] int64."""
    position_ids: Tensor
    """[1, N] int64: starts again at 0 with every row."""
    cu_seqlens: Tensor
    """[rows + 1] int32: where each row starts, then N. One more entry when padding to `multiple` was needed."""
    max_seqlen: int
    """Tokens of the longest row."""
    logit_positions: Tensor
    """[M] int64: index in the stream whose next token is valid, in the order of `TokenBatch.from_experience`."""
    targets: Tensor
    """[M] int64: that next token."""
    last_positions: Tensor
    """[rows] int64: index in the stream of each row's last token, where a reward model is read."""
    num_valid: tuple[int, ...]
    """Valid tokens of each row: splits a [M] result into rows."""
    num_padding: int = 0
    """Tokens at the end of the stream that belong to no row of the experience."""

    def split(self, values: Tensor) -> list[Tensor]:
        """A [M] result as one tensor per row, in the order of `rows`."""
        return list(values.split(list(self.num_valid)))

    def to(self, device: torch.device) -> Self:
        """A copy on `device`."""
        tensors = {name: value.to(device) for name, value in self.__dict__.items() if isinstance(value, Tensor)}
        moved: dict[str, Any] = tensors
        return replace(self, **moved)


def pack_rows(experience: Experience, rows: Sequence[int], multiple: int = 1) -> PackedRows:
    """Lay `rows` end to end. When N is no multiple of `multiple`, padding follows as a row that is never read."""
    assert rows, "a micro-batch needs at least one row"
    lengths = experience.lengths[list(rows)].tolist()
    padding = -sum(lengths) % multiple
    ids = [experience.tokens[row, :length] for row, length in zip(rows, lengths, strict=True)]
    parts = ids + ([torch.full((padding,), PAD, dtype=torch.int64)] if padding else [])
    sizes = torch.tensor([len(part) for part in parts])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    stream = torch.cat(parts)
    masks = [experience.mask[row] for row in rows]
    positions = torch.cat([mask.nonzero()[:, 0] + start for mask, start in zip(masks, starts.tolist(), strict=False)])
    return PackedRows(
        rows=tuple(rows),
        input_ids=stream[None],
        position_ids=torch.cat([torch.arange(size) for size in sizes.tolist()])[None],
        cu_seqlens=starts.to(torch.int32),
        max_seqlen=int(sizes.max()),
        logit_positions=positions,
        targets=stream[positions + 1],
        last_positions=starts[1 : len(rows) + 1] - 1,
        num_valid=tuple(int(mask.sum()) for mask in masks),
        num_padding=padding,
    )


def _first_fit(rows: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for row in rows:
        place = next((i for i, left in enumerate(room) if left >= lengths[row]), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[place].append(row)
        room[place] -= lengths[row]
    return bins


def _lightest_first(rows: Sequence[int], lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load = [0] * num_bins
    for row in rows:
        place = load.index(min(load))
        bins[place].append(row)
        load[place] += lengths[row]
    return bins
