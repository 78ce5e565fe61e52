"""Rows packed into micro-batches: rows of about equal total length, laid end to end in one stream without padding.

A stream is made of segments. A segment is a row, or what follows the prompt of a row whose prompt is in the stream
already, as the beginning of another row: it continues that prompt, as if it stood right behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from megarlhf.records.experience import PAD, Experience
from megarlhf.records.spans import Spans

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
    """[1, N] int64: place of a token in its row."""
    cu_seqlens: Tensor
    """[segments + 1] int32: where each segment starts, then N. One more entry when there is padding at the end."""
    prefixes: tuple[tuple[int, int], ...]
    """Of each segment, padding excepted: where in the stream the tokens begin that it continues, and how many they are;
    (0, 0) where it begins a row."""
    max_seqlen: int
    """Tokens of the longest row."""
    logit_positions: Tensor
    """[M] int64: index in the stream whose next token is valid, in the order of `TokenBatch.from_experience`. The last
    token of a shared prompt occurs once for each row that goes on from it."""
    targets: Tensor
    """[M] int64: that next token."""
    target_positions: Tensor
    """[M] int64: index in the stream of that next token; -1 where it is not computed."""
    last_positions: Tensor
    """[rows] int64: index in the stream of the last token of each row that is computed; -1 where none is."""
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


def pack_rows(experience: Experience, rows: Sequence[int], multiple: int = 1, spans: Spans | None = None) -> PackedRows:
    """Lay `rows` end to end: all their tokens, or those that `spans` of the experience says are computed.

    When N is no multiple of `multiple`, or nothing is computed, padding follows as a segment that is never read.
    """
    assert rows, "a micro-batch needs at least one row"
    spans = spans or Spans.unshared(experience.lengths.tolist())
    segments, prompt_starts, rest_starts, num_tokens = _segments(spans, rows)
    padding = -num_tokens % multiple if num_tokens else multiple
    ids = [experience.tokens[one.row, one.first : one.stop] for one in segments]
    positions = [torch.arange(one.first, one.stop) for one in segments]
    if padding:
        ids.append(torch.full((padding,), PAD, dtype=torch.int64))
        positions.append(torch.arange(padding))
    lengths = torch.tensor([spans.lengths[row] for row in rows])
    prompts = torch.tensor([spans.prompts[row] for row in rows])

    def places(at: Tensor, position: Tensor) -> Tensor:
        """Index in the stream of tokens at `position` of the `at`-th row; -1 where it is not computed."""
        prompt = prompts[at]
        found = torch.where(position < prompt, prompt_starts[at] + position, rest_starts[at] + position - prompt)
        return torch.where((position >= 0) & (position < lengths[at]), found, -1)

    index = torch.tensor(list(rows))
    mask = experience.mask[index]
    at, before = mask.nonzero(as_tuple=True)
    sizes = torch.tensor([0] + [len(part) for part in ids])
    return PackedRows(
        rows=tuple(rows),
        input_ids=torch.cat(ids)[None],
        position_ids=torch.cat(positions)[None],
        cu_seqlens=sizes.cumsum(0).to(torch.int32),
        prefixes=tuple(one.prefix for one in segments),
        max_seqlen=max(padding, int(lengths.max())),
        logit_positions=places(at, before),
        targets=experience.tokens[index[at], before + 1],
        target_positions=places(at, before + 1),
        last_positions=places(torch.arange(len(rows)), lengths - 1),
        num_valid=tuple(mask.sum(1).tolist()),
        num_padding=padding,
    )


@dataclass(frozen=True)
class _Segment:
    """Tokens `first` to `stop` of a row."""

    row: int
    first: int
    stop: int
    prefix: tuple[int, int]


def _segments(spans: Spans, rows: Sequence[int]) -> tuple[list[_Segment], Tensor, Tensor, int]:
    """(segments in stream order; where each row's prompt begins [rows], and what follows it [rows]; tokens in all)."""
    segments: list[_Segment] = []
    prompt_of: dict[int, int] = {}
    prompt_starts, rest_starts, num_tokens = [], [], 0
    for row in rows:
        length, prompt, family = spans.lengths[row], spans.prompts[row], spans.families[row]
        is_first = family not in prompt_of
        start = prompt_of.setdefault(family, num_tokens)
        first = 0 if is_first else prompt
        if first < length:
            segments.append(_Segment(row, first, length, (start, first) if first else (0, 0)))
        prompt_starts.append(start)
        rest_starts.append(num_tokens + prompt - first)
        num_tokens += max(length - first, 0)
    return segments, torch.tensor(prompt_starts), torch.tensor(rest_starts), num_tokens


def _first_fit(rows: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Each row into the first bin that has room. `tree` holds the room of all bins there might be, and above each two
    places the larger of them, so that a bin is found without looking at all of them."""
    leaves = 1 << max(len(rows) - 1, 0).bit_length()
    tree = [max_tokens] * (2 * leaves)
    bins: list[list[int]] = []
    for row in rows:
        place = 1
        while place < leaves:
            place = 2 * place + (tree[2 * place] < lengths[row])
        if place - leaves == len(bins):
            bins.append([])
        bins[place - leaves].append(row)
        tree[place] -= lengths[row]
        while place > 1:
            place //= 2
            tree[place] = max(tree[2 * place], tree[2 * place + 1])
    return bins


def _lightest_first(rows: Sequence[int], lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, place) for place in range(num_bins)]
    for row in rows:
        load, place = loads[0]
        bins[place].append(row)
        heapreplace(loads, (load + lengths[row], place))
    return bins
