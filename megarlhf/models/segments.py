"""How a packed stream is cut for attention: which queries see which keys."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarlhf.models.masks import Masks
from megarlhf.parallel.context import held_slices

Span = tuple[int, int]
"""(start, stop) in a stream."""


@dataclass(frozen=True)
class AttentionPlan:
    """Runs: neighbouring queries of one segment that a rank holds, with the keys up to the last of them."""

    query_sizes: list[int]
    """Tokens of each run, in the order in which the rank holds them; then those of the padding, which may be 0."""
    key_sizes: list[int]
    """The stream in pieces, each of which a run sees whole or not at all."""
    pieces: list[list[int]]
    """Of each run: which pieces it sees, in order."""

    def keys_of_runs(self, keys: Tensor) -> Iterator[Tensor]:
        """What each run sees of `keys` [1, groups, N, D]: [1, groups, its own, D].

        Pieces are split off, not sliced: the gradient of each slice would be as large as the stream. One that several
        runs see is expanded, so that their gradients are added up once, in float32 inside, not in turn.
        """
        uses = Counter(piece for run in self.pieces for piece in run)
        parts = [
            iter(part.expand(uses[index], -1, -1, -1).split(1) if uses[index] > 1 else [part])
            for index, part in enumerate(keys.split(self.key_sizes, dim=2))
        ]
        for run in self.pieces:
            seen = [next(parts[piece]) for piece in run]
            yield seen[0] if len(seen) == 1 else torch.cat(seen, dim=2)


@dataclass
class PackedSegments(PackedSeqParams):
    """A stream as `records.PackedRows` lays it out; `cu_seqlens_q`, on the host, says where segments begin, then the
    end of the last."""

    prefixes: tuple[tuple[int, int], ...] = ()
    """(start, tokens) in the stream of what each segment continues; none do where it is empty."""
    masks: Masks = field(default_factory=Masks)
    """Of all layers."""
    plans: dict[tuple[int, int, int], AttentionPlan] = field(default_factory=dict)

    def plan(self, num_tokens: int, cp: int, rank: int) -> AttentionPlan:
        """For rank `rank` of `cp` and N = `num_tokens`; made once."""
        key = num_tokens, cp, rank
        if key not in self.plans:
            starts = self.cu_seqlens_q.tolist()
            segments = [(start, stop) for start, stop in pairwise(starts) if start < stop]
            assert not self.prefixes or len(self.prefixes) == len(starts) - 1 == len(segments), self.prefixes
            prefixes = self.prefixes or ((0, 0),) * len(segments)
            self.plans[key] = _plan(segments, prefixes, held_slices(*key), num_tokens)
        return self.plans[key]


def _plan(
    segments: Sequence[Span], prefixes: Sequence[tuple[int, int]], held: Sequence[Span], total: int
) -> AttentionPlan:
    """`prefixes` are (start, tokens)."""
    sizes, seen = [], []
    for here, end in held:
        for (start, stop), (prefix, length) in zip(segments, prefixes, strict=True):
            first, last = max(here, start), min(end, stop)
            if first < last:
                sizes.append(last - first)
                seen.append([(prefix, prefix + length), (start, last)] if length else [(start, last)])
    cuts = sorted({0, total, *(edge for spans in seen for span in spans for edge in span)})
    index = {cut: number for number, cut in enumerate(cuts)}
    pieces = [[piece for start, stop in spans for piece in range(index[start], index[stop])] for spans in seen]
    padding = sum(end - here for here, end in held) - sum(sizes)
    return AttentionPlan([*sizes, padding], [stop - start for start, stop in pairwise(cuts)], pieces)
