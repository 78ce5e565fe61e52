"""Names and shapes that megatron-core gives a model's weights in a distributed checkpoint, from the family's table.

A checkpoint holds each weight as if there were one tensor rank, and all layers' weights of a kind as one tensor with
a first axis of layers; a rank owns boxes of these. Which boxes follows from the pieces of the rank's local map, so
that a family needs nothing here but its table. megarlhf's models use megatron-core's local layers, whose norms go by
the names of Transformer Engine's fused layers, so that one checkpoint serves both.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from megarlhf.config.layout import Layout
from megarlhf.models.architecture import Architecture, padded_vocab, stage_layers
from megarlhf.models.families import FAMILIES
from megarlhf.models.names import Cut, Family, Head, stage_weights
from megarlhf.parallel.grid import Coordinates
from megarlhf.weights.boxes import Box, LocalTensor, Piece, intersect, joined_rows, move, num_elements, whole
from megarlhf.weights.local_map import local_map

_ONE = Layout()
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
OBJECT_SUFFIXES = ("_extra_state",)


@dataclass(frozen=True)
class Place:
    """Where a weight lies in a checkpoint: the tensor's name and, for a layer's, its index on the axis of layers."""

    key: str
    layer: int | None

    def single(self) -> "Place":
        """The name it has instead where each layer is a tensor of its own (`non_homogeneous_layers`)."""
        if self.layer is None:
            return self
        return Place(self.key.replace("decoder.layers.", f"decoder.layers.{self.layer}.", 1), None)

    def box(self, box: Box) -> Box:
        """A box of the weight, as a box of the tensor."""
        return box if self.layer is None else ((self.layer, self.layer + 1), *box)


@dataclass(frozen=True)
class Share:
    """What one rank writes of one weight: each `boxes` pair is (where in the checkpoint's tensor, box of `local`)."""

    place: Place
    local: LocalTensor
    boxes: tuple[tuple[Box, Box], ...]


@lru_cache(maxsize=4)
def whole_weights(architecture: Architecture, head: Head) -> dict[Place, LocalTensor]:
    """Every weight of the checkpoint, whole, as pieces of Hugging Face tensors."""
    held = local_map(architecture, _ONE, Coordinates(0, 0, 0), head)
    family, layers = FAMILIES[architecture.family], range(architecture.num_layers)
    return {_place(family, name, layers): tensor for (_, name), tensor in held.items()}


def key_shapes(architecture: Architecture, layout: Layout, head: Head) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a checkpoint written under `layout` (tp pads the vocabulary)."""
    family, shapes = FAMILIES[architecture.family], {}
    tables = {
        weight.local for weight in stage_weights(family, architecture, _ONE, 0, 0, head) if weight.cut is Cut.VOCABULARY
    }
    for place, tensor in whole_weights(architecture, head).items():
        rows = padded_vocab(architecture, layout) if place.key in tables else tensor.shape[0]
        layers = () if place.layer is None else (architecture.num_layers,)
        shapes[place.key] = (*layers, rows, *tensor.shape[1:])
    return shapes


def rank_shares(architecture: Architecture, layout: Layout, head: Head, tp: int, pp: int) -> list[Share]:
    """What the rank at (tp, pp) writes, in the order of the network. Copies (norms, a tied head) are written once."""
    family = FAMILIES[architecture.family]
    held = local_map(architecture, layout, Coordinates(tp, pp, 0), head)
    complete = whole_weights(architecture, head)
    shares = []
    for chunk in range(layout.vp):
        layers = stage_layers(architecture, layout, pp, chunk)
        for weight in stage_weights(family, architecture, layout, pp, chunk, head):
            place = _place(family, weight.local, layers)
            is_copy = (weight.cut is Cut.WHOLE and tp > 0) or place not in complete
            if not is_copy:
                local = held[chunk, weight.local]
                if weight.cut is Cut.VOCABULARY:
                    pairs = [(_rows_from(tp * local.shape[0], local.shape), whole(local.shape))]
                else:
                    pairs = _boxes(local, complete[place])
                shares.append(Share(place, local, tuple((place.box(target), source) for target, source in pairs)))
    return shares


def rank_objects(architecture: Architecture, layout: Layout, pp: int) -> list[str]:
    """Names of the empty `_extra_state` objects of a stage's layers: its linear modules ask for one when loaded."""
    family = FAMILIES[architecture.family]
    names = [_place(family, weight.local.format(layer=0), range(1)).key for weight in family.layer if weight.is_matrix]
    modules = dict.fromkeys(name.rpartition(".")[0] for name in names)
    layers = [layer for chunk in range(layout.vp) for layer in stage_layers(architecture, layout, pp, chunk)]
    return [f"{module}._extra_state/shard_{layer}_{architecture.num_layers}" for layer in layers for module in modules]


def _rows_from(start: int, shape: tuple[int, ...]) -> Box:
    return ((start, start + shape[0]), *whole(shape[1:]))


def _boxes(local: LocalTensor, complete: LocalTensor) -> list[tuple[Box, Box]]:
    """(where in the whole weight, box of the local one): as few blocks of rows as the pieces can be joined to."""
    sources: dict[str, list[Piece]] = {}
    for piece in complete.pieces:
        sources.setdefault(piece.hf_name, []).append(piece)
    found: list[tuple[Box, Box]] = []
    for piece in sorted(local.pieces, key=lambda piece: piece.target):
        for other in sources[piece.hf_name]:
            common = intersect(piece.source, other.source)
            if common is None:
                continue
            target, box = move(common, other.source, other.target), move(common, piece.source, piece.target)
            joined = [joined_rows(*pair) for pair in zip(found[-1], (target, box), strict=True)] if found else [None]
            if None in joined:
                found.append((target, box))
            else:
                found[-1] = (joined[0], joined[1])
    assert sum(num_elements(box) for _, box in found) == num_elements(whole(local.shape)), "pieces must fill a weight"
    return found


def _place(family: Family, local: str, layers: range) -> Place:
    found = _LAYER.match(local)
    if not found:
        return Place(local, None)
    name = found[2]
    for ours, theirs in family.stored_names:
        if name.startswith(ours):
            name = theirs + name.removeprefix(ours)
    return Place(f"decoder.layers.{name}", layers[int(found[1])])
