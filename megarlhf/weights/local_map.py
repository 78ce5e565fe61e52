"""Which elements of which Hugging Face tensors a rank holds, and where: the question behind load, export, reshard.

A pure function of (architecture, layout, the rank's coordinates, head); names and cuts come from the family's table.
"""

from megarlhf.config.layout import Layout
from megarlhf.models.architecture import Architecture
from megarlhf.models.families import FAMILIES
from megarlhf.models.names import Cut, Head, Weight, stage_weights
from megarlhf.parallel.grid import Coordinates
from megarlhf.weights.boxes import Box, LocalTensor, Piece, intersect, move, whole

Key = tuple[int, str]
"""(model chunk, parameter name in the chunk)."""


def local_map(
    architecture: Architecture, layout: Layout, coordinates: Coordinates, head: Head
) -> dict[Key, LocalTensor]:
    """Every parameter of one rank as pieces of Hugging Face tensors. Depends on the rank's tp, pp and ep only."""
    family = FAMILIES[architecture.family]
    return {
        (chunk, weight.local): _cut(weight, architecture, layout.tp, coordinates.tp)
        for chunk in range(layout.vp)
        for weight in stage_weights(family, architecture, layout, coordinates.pp, chunk, head, coordinates.ep)
    }


def hf_shapes(architecture: Architecture, head: Head) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model's Hugging Face folder holds, with its shape, in the order of the network."""
    weights = stage_weights(FAMILIES[architecture.family], architecture, Layout(), 0, 0, head)
    return {name: shape for weight in weights for name, shape in weight.tensors.items()}


def _cut(weight: Weight, architecture: Architecture, tp: int, rank: int) -> LocalTensor:
    if weight.expert:
        tp, rank = 1, 0
    if weight.cut is Cut.WHOLE:
        return _window(weight, whole(weight.shapes[0]))
    if weight.cut is Cut.COLUMNS:
        rows, columns = weight.shapes[0]
        return _window(weight, ((0, rows), _share(columns, tp, rank)))
    if weight.cut is Cut.ROWS:
        return _window(weight, _rows_share(weight.shapes[0], tp, rank))
    if weight.cut is Cut.VOCABULARY:
        return _vocabulary(weight, tp, rank)
    if weight.cut is Cut.GATE_UP:
        halves = zip(weight.hf, weight.first_rows, weight.shapes, strict=True)
        return _stack([(name, _below(first, _rows_share(shape, tp, rank))) for name, first, shape in halves])
    assert weight.cut is Cut.GROUPED_QKV, f"{weight.local}: no rule for {weight.cut}"
    return _rows_of(_grouped_qkv(weight, architecture), tp, rank)


def _share(size: int, tp: int, rank: int) -> tuple[int, int]:
    assert size % tp == 0, f"tp {tp} does not divide {size}; layout_violations should have refused it"
    return rank * (size // tp), (rank + 1) * (size // tp)


def _rows_share(shape: tuple[int, ...], tp: int, rank: int) -> Box:
    return (_share(shape[0], tp, rank), *whole(shape[1:]))


def _window(weight: Weight, box: Box) -> LocalTensor:
    """A local tensor that is one box of one Hugging Face tensor."""
    return _stack([(weight.hf[0], box)])


def _stack(blocks: list[tuple[str, Box]]) -> LocalTensor:
    """Blocks of rows of several Hugging Face tensors, one below the other."""
    pieces, row = [], 0
    for name, box in blocks:
        rows = box[0][1] - box[0][0]
        pieces.append(Piece(name, box, ((row, row + rows), *((0, stop - start) for start, stop in box[1:]))))
        row += rows
    return LocalTensor((row, *(stop for _, stop in pieces[0].target[1:])), tuple(pieces))


def _vocabulary(weight: Weight, tp: int, rank: int) -> LocalTensor:
    """A rank's rows of a table whose row count is rounded up to a multiple of tp: rows past the end are padding."""
    rows, columns = weight.shapes[0]
    share = -(-rows // tp)
    start, stop = min(rank * share, rows), min((rank + 1) * share, rows)
    held = Piece(weight.hf[0], ((start, stop), (0, columns)), ((0, stop - start), (0, columns)))
    return LocalTensor((share, columns), (held,) if stop > start else ())


def _grouped_qkv(weight: Weight, architecture: Architecture) -> LocalTensor:
    """The whole interleaved matrix (or bias): for each key/value group its query rows, its key rows, its value rows."""
    groups = architecture.num_kv_groups
    rows_per_group = tuple(shape[0] // groups for shape in weight.shapes)
    columns = whole(weight.shapes[0][1:])
    blocks = [
        (name, _below(first, ((group * rows, (group + 1) * rows), *columns)))
        for group in range(groups)
        for name, first, rows in zip(weight.hf, weight.first_rows, rows_per_group, strict=True)
    ]
    return _stack(blocks)


def _below(first: int, box: Box) -> Box:
    """A box of a part, as a box of the tensor in which the part begins at row `first`."""
    (start, stop), *columns = box
    return ((first + start, first + stop), *columns)


def _rows_of(tensor: LocalTensor, tp: int, rank: int) -> LocalTensor:
    """Contiguous rows of an assembled matrix. With more tensor ranks than groups, some hold no key or value row."""
    window = _rows_share(tensor.shape, tp, rank)
    local = whole((tensor.shape[0] // tp, *tensor.shape[1:]))
    pieces = []
    for piece in tensor.pieces:
        common = intersect(piece.target, window)
        if common is not None:
            pieces.append(Piece(piece.hf_name, move(common, piece.target, piece.source), move(common, window, local)))
    return LocalTensor(tuple(stop for _, stop in local), tuple(pieces))
