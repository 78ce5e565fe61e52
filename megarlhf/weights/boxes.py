"""Integer boxes: which block of a tensor, as a half-open interval per dimension. All about weights is said so.

No torch here: boxes are tuples of ints, so that a plan for thousands of ranks costs no tensors.
"""

from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""((start, stop), ...), one interval per dimension; never empty."""


@dataclass(frozen=True)
class Piece:
    """Box `source` of the Hugging Face tensor `hf_name` lies, unchanged in shape, at box `target` of a local tensor."""

    hf_name: str
    source: Box
    target: Box


@dataclass(frozen=True)
class LocalTensor:
    """One local tensor: its shape, and the pieces that fill it. Elements outside every piece are padding, zero."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def whole(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor of this shape."""
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Lengths of the intervals."""
    return tuple(stop - start for start, stop in box)


def num_elements(box: Box) -> int:
    """Elements in the box."""
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


def slices(box: Box) -> tuple[slice, ...]:
    """The box as an index for a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def intersect(one: Box, other: Box) -> Box | None:
    """The common block of two boxes of one tensor, or None."""
    common = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        # Most pairs do not meet, and planning asks about millions of them: leave at the first gap.
        start, stop = a if a > c else c, b if b < d else d
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def move(box: Box, origin: Box, destination: Box) -> Box:
    """Where `box`, a part of `origin`, lies once `origin` is laid at `destination` (same shape)."""
    if origin == destination:
        return box
    return tuple(
        [
            (start - old + new, stop - old + new)
            for (start, stop), (old, _), (new, _) in zip(box, origin, destination, strict=True)
        ]
    )


def halve(box: Box) -> tuple[Box, Box]:
    """Two halves, cut along the first dimension longer than 1 (rows first, so that halves stay contiguous)."""
    axis = next(index for index, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[axis]
    middle = (start + stop) // 2
    return box[:axis] + ((start, middle),) + box[axis + 1 :], box[:axis] + ((middle, stop),) + box[axis + 1 :]


def split(box: Box, max_elements: int) -> list[Box]:
    """The box cut into parts of at most `max_elements` (at least 1) elements, in order."""
    if num_elements(box) <= max_elements:
        return [box]
    return [part for half in halve(box) for part in split(half, max_elements)]


def joined_rows(one: Box, other: Box) -> Box | None:
    """The union of two boxes when `other` continues the rows of `one`, else None."""
    if one[0][1] != other[0][0] or one[1:] != other[1:]:
        return None
    return ((one[0][0], other[0][1]), *one[1:])
