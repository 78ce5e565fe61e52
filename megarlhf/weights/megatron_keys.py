"""Names and shapes that megatron-core gives a model's weights in a distributed checkpoint, from the family's table.

A checkpoint holds each weight as if there were one tensor rank, and all layers' weights of a kind as one tensor with
a first axis of layers; a rank owns boxes of these. megarlhf's models use megatron-core's local layers, whose norms go
by the names of Transformer Engine's fused layers, so that one checkpoint serves both.
"""

import re
from dataclasses import dataclass

from megarlhf.config.layout import Layout
from megarlhf.models.architecture import Architecture, stage_layers
from megarlhf.models.families import FAMILIES
from megarlhf.models.names import Cut, Head, stage_weights
from megarlhf.parallel.grid import Coordinates
from megarlhf.weights.boxes import Box, LocalTensor, whole
from megarlhf.weights.local_map import local_map

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""How megatron-core's local layers spell their norms in a checkpoint (their `sharded_state_dict_keys_map`)."""
_STATEFUL = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
"""Modules of a layer that ask for an `_extra_state` when loaded; without FP8 it is None."""
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
    """What one rank writes of one weight: each `boxes` pair is (where in the checkpoint's tensor, rows of `local`)."""

    place: Place
    local: LocalTensor
    boxes: tuple[tuple[Box, Box], ...]


def whole_weights(architecture: Architecture, head: Head) -> dict[Place, LocalTensor]:
    """Every weight of the checkpoint, whole, as pieces of Hugging Face tensors."""
    held = local_map(architecture, Layout(), Coordinates(0, 0, 0), head)
    return {_place(name, range(architecture.num_layers)): tensor for (_, name), tensor in held.items()}


def key_shapes(architecture: Architecture, layout: Layout, head: Head) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a checkpoint written under `layout` (tp pads the vocabulary)."""
    shapes = {}
    for weight in stage_weights(FAMILIES[architecture.family], architecture, Layout(), 0, 0, head):
        place = _place(weight.local, range(architecture.num_layers))
        rows, *columns = weight.shapes[0]
        if weight.cut is Cut.VOCABULARY:
            rows = -(-rows // layout.tp) * layout.tp
        elif weight.cut in (Cut.GATE_UP, Cut.GROUPED_QKV):
            rows = sum(shape[0] for shape in weight.shapes)
        layers = () if place.layer is None else (architecture.num_layers,)
        shapes[place.key] = (*layers, rows, *columns)
    return shapes


def rank_shares(architecture: Architecture, layout: Layout, head: Head, tp: int, pp: int) -> list[Share]:
    """What the rank at (tp, pp) writes, in the order of the network. Copies (norms, a tied head) are written once."""
    held = local_map(architecture, layout, Coordinates(tp, pp, 0), head)
    layers = stage_layers(architecture, layout, pp)
    family = FAMILIES[architecture.family]
    shares = []
    for weight in stage_weights(family, architecture, layout, pp, 0, head):
        is_copy = (weight.cut is Cut.WHOLE and tp > 0) or (
            weight.local == family.output.local and weight.hf == family.embedding.hf
        )
        if not is_copy:
            local, place = held[0, weight.local], _place(weight.local, layers)
            pairs = _boxes(weight.cut, local.shape, tp, layout.tp)
            shares.append(Share(place, local, tuple((place.box(target), source) for target, source in pairs)))
    return shares


def rank_objects(architecture: Architecture, layout: Layout, pp: int) -> list[str]:
    """Names of the empty `_extra_state` objects of a stage's layers."""
    return [
        f"decoder.layers.{module}._extra_state/shard_{layer}_{architecture.num_layers}"
        for layer in stage_layers(architecture, layout, pp)
        for module in _STATEFUL
    ]


def _boxes(cut: Cut, shape: tuple[int, ...], rank: int, tp: int) -> list[tuple[Box, Box]]:
    """(where in the whole weight, box of the local one) for each block that rank `rank` of tp writes."""
    rows, rest = shape[0], whole(shape[1:])
    if cut is Cut.WHOLE:
        return [(whole(shape), whole(shape))]
    if cut is Cut.COLUMNS:
        columns = shape[1]
        return [((((0, rows)), (rank * columns, (rank + 1) * columns)), whole(shape))]
    if cut is Cut.GATE_UP:
        half = rows // 2
        return [
            (((start, start + half), *rest), ((place * half, (place + 1) * half), *rest))
            for place, start in enumerate((rank * half, (tp + rank) * half))
        ]
    return [(((rank * rows, (rank + 1) * rows), *rest), whole(shape))]


def _place(local: str, layers: range) -> Place:
    found = _LAYER.match(local)
    if not found:
        return Place(local, None)
    name = found[2]
    for ours, theirs in _FUSED.items():
        if name.startswith(ours):
            name = theirs + name.removeprefix(ours)
    return Place(f"decoder.layers.{name}", layers[int(found[1])])
