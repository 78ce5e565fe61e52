"""Optimizer shards as boxes: a data-parallel rank's share is a stretch of a flattened local tensor, no box of it.

A stretch of a matrix is at most three boxes: the end of a row, whole rows, the beginning of a row. Boxes of the local
tensor are boxes of Hugging Face tensors, which mean the same under every layout.
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from megarlhf.weights.boxes import Box, LocalTensor, intersect, move, num_elements, shape_of, slices
from megarlhf.weights.local_map import Key


@dataclass(frozen=True)
class NamedBox:
    """Values of one box of a named global tensor."""

    name: str
    box: Box
    values: torch.Tensor


def stretch_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Elements start .. stop - 1 of a flattened tensor as boxes of it, in the order of the elements."""
    if start >= stop:
        return []
    if len(shape) == 1:
        return [((start, stop),)]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        return _inside(shape, first, start - first * row, stop - first * row)
    whole_from, whole_to = -(-start // row), stop // row
    boxes = _inside(shape, first, start - first * row, row) if whole_from > first else []
    if whole_to > whole_from:
        boxes.append(((whole_from, whole_to), *((0, size) for size in shape[1:])))
    return boxes + (_inside(shape, last, 0, stop - last * row) if whole_to * row < stop else [])


def _inside(shape: tuple[int, ...], row: int, start: int, stop: int) -> list[Box]:
    return [((row, row + 1), *box) for box in stretch_boxes(shape[1:], start, stop)]


def named_boxes(
    tensor: LocalTensor, flat: torch.Tensor, start: int, spoken_for: Set[tuple[str, Box]]
) -> Iterator[NamedBox]:
    """The elements start .. start + len(flat) - 1 of a local tensor, as boxes of Hugging Face tensors.

    Only pieces in `spoken_for` (name, box of the whole piece) are given; values are views of `flat`.
    """
    for box, values in _boxed(tensor, flat, start):
        for piece in tensor.pieces:
            common = intersect(piece.target, box) if (piece.hf_name, piece.source) in spoken_for else None
            if common is not None:
                part = values[slices(move(common, box, tuple((0, size) for size in values.shape)))]
                yield NamedBox(piece.hf_name, move(common, piece.target, piece.source), part)


def wanted_boxes(tensor: LocalTensor, flat: torch.Tensor, start: int) -> Iterator[NamedBox]:
    """As `named_boxes`, for filling `flat`: every piece that this rank holds."""
    return named_boxes(tensor, flat, start, {(piece.hf_name, piece.source) for piece in tensor.pieces})


def _boxed(tensor: LocalTensor, flat: torch.Tensor, start: int) -> Iterator[tuple[Box, torch.Tensor]]:
    """(box of the local tensor, its values as a view of `flat`)."""
    at = 0
    for box in stretch_boxes(tensor.shape, start, start + flat.numel()):
        count = num_elements(box)
        yield box, flat[at : at + count].view(shape_of(box))
        at += count


def speakers(
    held: Sequence[Mapping[Key, LocalTensor]], teams: Sequence[Sequence[int]]
) -> list[set[tuple[Key, str, Box]]]:
    """For each rank the (parameter, tensor, box) that its team writes; each box has one team, though several hold it.

    A team is the ranks that share one copy of what they hold, a stretch of it each: a data-parallel group. Norms that
    tensor ranks repeat, and tied embeddings of the first and last stage, are written by the team of the lowest rank.
    """
    taken: set[tuple[str, Box]] = set()
    found: list[set[tuple[Key, str, Box]]] = [set() for _ in held]
    for team in sorted(teams, key=min):
        mine = set()
        for key, tensor in held[min(team)].items():
            for piece in tensor.pieces:
                if (piece.hf_name, piece.source) not in taken:
                    taken.add((piece.hf_name, piece.source))
                    mine.add((key, piece.hf_name, piece.source))
        for rank in team:
            found[rank] = mine
    return found
