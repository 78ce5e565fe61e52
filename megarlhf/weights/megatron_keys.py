"""Names and shapes that megatron-core gives a model's weights in a distributed checkpoint, from the family's table.

A checkpoint holds each weight as if there were one tensor rank, and all layers' weights of a kind as one tensor with
a first axis of layers; experts of a mixture have a second axis. Where only some layers are mixtures, each layer has
tensors of its own. A rank owns boxes of these. Which boxes follows from the pieces of the rank's local map, so that a
family needs nothing here but its table. megarlhf's models use megatron-core's local layers, whose norms go by the names
of Transformer Engine's fused layers, so that one checkpoint serves both; where Transformer Engine does not fuse, before
experts, the norm is written under both names.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from megarlhf.config.layout import Layout
from megarlhf.models.architecture import Architecture, padded_vocab, stage_layers
from megarlhf.models.families import FAMILIES
from megarlhf.models.names import Cut, Head, stage_weights
from megarlhf.parallel.grid import Coordinates
from megarlhf.weights.boxes import Box, LocalTensor, Piece, intersect, joined_rows, move, num_elements, whole
from megarlhf.weights.local_map import local_map

_ONE = Layout()
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.+)$")
_FUSED_NORM, _OWN_NORM = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
OBJECT_SUFFIXES = ("_extra_state",)


@dataclass(frozen=True)
class Place:
    """Where a weight lies in a checkpoint: the tensor's name and, where it has such axes, its layer and its expert."""

    key: str
    layer: int | None = None
    expert: int | None = None

    @property
    def axes(self) -> tuple[int, ...]:
        """Indexes on the axes that the tensor has before those of the weight."""
        return tuple(index for index in (self.layer, self.expert) if index is not None)

    def single(self) -> "Place":
        """The name it has instead where each layer is a tensor of its own (`non_homogeneous_layers`)."""
        if self.layer is None:
            return self
        return Place(self.key.replace("decoder.layers.", f"decoder.layers.{self.layer}.", 1), None, self.expert)

    def box(self, box: Box) -> Box:
        """A box of the weight, as a box of the tensor."""
        return (*((index, index + 1) for index in self.axes), *box)

    def other_names(self) -> list["Place"]:
        """Where other writers, or other specs, have the same weight."""
        same = [replace(self, key=self.key.replace(_FUSED_NORM, _OWN_NORM))] if self.key.endswith(_FUSED_NORM) else []
        return same + [place.single() for place in [self, *same] if place.layer is not None]


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
    layers = range(architecture.num_layers)
    return {_place(architecture, name, layers): tensor for (_, name), tensor in held.items()}


def key_shapes(architecture: Architecture, layout: Layout, head: Head) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a checkpoint written under `layout` (tp pads the vocabulary)."""
    family, shapes = FAMILIES[architecture.family], {}
    tables = {
        weight.local for weight in stage_weights(family, architecture, _ONE, 0, 0, head) if weight.cut is Cut.VOCABULARY
    }
    for place, tensor in whole_weights(architecture, head).items():
        rows = padded_vocab(architecture, layout) if place.key in tables else tensor.shape[0]
        for name in (place, *_own_norm(architecture, place)):
            shapes[name.key] = (*_axis_sizes(architecture, name), rows, *tensor.shape[1:])
    return shapes


def rank_shares(architecture: Architecture, layout: Layout, head: Head, tp: int, pp: int) -> list[Share]:
    """What the rank at (tp, pp) writes, in the order of the network. Copies (norms, a tied head) are written once.

    Tensor ranks take turns with experts, which they do not cut; `layout.ep` is 1: files are not written by ep.
    """
    family = FAMILIES[architecture.family]
    held = local_map(architecture, layout, Coordinates(tp, pp, 0), head)
    complete = whole_weights(architecture, head)
    shares = []
    for chunk in range(layout.vp):
        layers = stage_layers(architecture, layout, pp, chunk)
        for weight in stage_weights(family, architecture, layout, pp, chunk, head):
            place = _place(architecture, weight.local, layers)
            writer = place.expert % layout.tp if place.expert is not None else 0
            is_whole = weight.cut is Cut.WHOLE or weight.expert
            if not (is_whole and tp != writer) and place in complete:
                local = held[chunk, weight.local]
                if weight.cut is Cut.VOCABULARY:
                    pairs = [(_rows_from(tp * local.shape[0], local.shape), whole(local.shape))]
                else:
                    pairs = _boxes(local, complete[place])
                for name in (place, *_own_norm(architecture, place)):
                    shares.append(Share(name, local, tuple((name.box(target), source) for target, source in pairs)))
    return shares


def rank_objects(architecture: Architecture, layout: Layout, pp: int) -> list[str]:
    """Names of the empty `_extra_state` objects of a stage's layers and final norm: modules ask for one when loaded.

    megatron-core's local layers ask for their linears'; Transformer Engine's for every module's, attention and norms
    included, and refuse to load without. More than is asked for is an error to neither.
    """
    family, names = FAMILIES[architecture.family], []
    for chunk in range(layout.vp):
        layers = stage_layers(architecture, layout, pp, chunk)
        for weight in stage_weights(family, architecture, layout, pp, chunk, "vocabulary"):
            if weight.local.startswith("decoder."):
                place = _place(architecture, weight.local, layers)
                index, sizes = place.axes or (0,), _axis_sizes(architecture, place) or (1,)
                state = f"._extra_state/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, sizes))}"
                for name in (place, *_own_norm(architecture, place)):
                    module = name.key.rpartition(".")[0]
                    names.append(module + state)
                    names.append(module.replace("self_attention.linear_proj", "self_attention.core_attention") + state)
    return list(dict.fromkeys(names))


def _axis_sizes(architecture: Architecture, place: Place) -> tuple[int, ...]:
    """Sizes of a place's `axes`."""
    layers = () if place.layer is None else (architecture.num_layers,)
    return layers if place.expert is None else (*layers, architecture.mixture.num_experts)


def _own_norm(architecture: Architecture, place: Place) -> list[Place]:
    """The second name of the norm before a layer's experts."""
    mixture = architecture.mixture
    if mixture is None or not place.key.endswith(_FUSED_NORM):
        return []
    layer = place.layer if place.layer is not None else int(_LAYER.match(place.key)[1])
    return [place.other_names()[0]] if layer in mixture.layers else []


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


def _place(architecture: Architecture, local: str, layers: range) -> Place:
    found = _LAYER.match(local)
    if not found:
        return Place(local)
    name = found[2]
    for ours, theirs in FAMILIES[architecture.family].stored_names:
        if name.startswith(ours):
            name = theirs + name.removeprefix(ours)
    expert = _EXPERT.match(name)
    name = f"mlp.experts.experts.{expert[2]}" if expert else name
    place = Place(f"decoder.layers.{name}", layers[int(found[1])], int(expert[1]) if expert else None)
    is_uniform = architecture.num_dense_layers in (0, architecture.num_layers)
    return place if is_uniform else place.single()
