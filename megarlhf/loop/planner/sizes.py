"""Bytes of weights, gradients and optimizer state of one rank, exactly as the learner lays them out.

megatron-core's DistributedDataParallel moves the trained parameters of a chunk into one buffer per precision, with a
float32 gradient buffer of the same shape; the distributed optimizer gives each data-parallel rank an equal part of
every bucket of it. The rules (megatron-core 0.16.1 `_ParamAndGradBuffer`, 0.19.2 `_compute_per_buffer_param_layout`):
parameters in reverse order of construction, each starting at a multiple of 64 elements; one bucket, but for a tied
embedding on several stages, which has its own; buckets end at a multiple of lcm(dp, 128).
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from megarlhf.config.settings import Precision
from megarlhf.loop.planner.models import PlannedModel
from megarlhf.models.architecture import stage_layers
from megarlhf.models.families import FAMILIES
from megarlhf.models.names import Weight, adapted, stage_weights
from megarlhf.parallel.grid import Coordinates
from megarlhf.weights.boxes import num_elements, whole
from megarlhf.weights.local_map import local_map
from megarlhf.weights.transfers import ITEM_BYTES

START_MULTIPLE, BUCKET_MULTIPLE = 64, 128
GRADIENT_BYTES = MASTER_BYTES = 4
MOMENT_BYTES = 8
"""Adam's two moments in float32. Its counters of steps, a number each on the host, are not counted."""
_MODULES = (
    "input_layernorm",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "pre_mlp_layernorm",
    "mlp",
)
"""The modules of a layer in the order in which megatron-core makes them; what is not here comes last."""


@dataclass(frozen=True)
class Parameter:
    """One local parameter."""

    name: str
    numel: int
    dtype: Precision
    is_trained: bool
    has_own_bucket: bool
    is_expert: bool = False
    """Its gradient is summed over other ranks than the rest's, so it lies in buffers of its own."""

    @property
    def num_bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Buffer:
    """The trained parameters of one precision and chunk, laid out in one block."""

    dtype: Precision
    places: tuple[tuple[int, int], ...]
    """[start, stop) of each parameter."""
    buckets: tuple[tuple[int, int], ...]
    """[start, stop) of each bucket; the last one's end is the buffer's size in elements."""

    @property
    def numel(self) -> int:
        return self.buckets[-1][1]

    def shard(self, dp: int, dp_rank: int) -> int:
        """Elements of parameters that one data-parallel rank steps."""
        elements = 0
        for start, stop in self.buckets:
            share = (stop - start) // dp
            first = start + dp_rank * share
            for place in self.places:
                common = min(place[1], first + share) - max(place[0], first)
                elements += max(common, 0)
        return elements


@dataclass(frozen=True)
class ModelBytes:
    """What one model takes on one rank."""

    parameters: int
    """Without padding: what a copy of the weights on the host takes."""
    weights: int
    """As allocated: padded where a learner put them into its buffers."""
    gradients: int = 0
    optimizer: int = 0
    num_parameters: int = 0


@dataclass(frozen=True)
class Team:
    """The ranks that hold the same weights, and so share the optimizer's work on them: how many, and which of them."""

    size: int = 1
    rank: int = 0


def model_bytes(model: PlannedModel, at: Coordinates, dp: int) -> ModelBytes:
    """Bytes of `model` on the rank at `at`, of `dp` data-parallel ranks. Tensor ranks are alike (padding is local), but
    for the optimizer's part of experts.

    Context ranks hold the same weights, so the optimizer is cut over them too; over experts, whoever of the stage's
    tp * cp * dp ranks holds the same ones (parallel/grid.py).
    """
    if not model.is_trained:
        return _model_bytes(model, at.pp, Team(), Team())
    tp, cp, ep = model.layout.tp, model.layout.cp, model.layout.ep
    dense = Team(dp * cp, at.dp * cp + at.cp)
    if model.architecture.mixture is None:
        return _model_bytes(model, at.pp, dense, Team())
    return _model_bytes(model, at.pp, dense, Team(tp * dense.size // ep, (at.tp + tp * (at.cp + cp * at.dp)) // ep))


@cache
def _model_bytes(model: PlannedModel, pp_rank: int, dense: Team, experts: Team) -> ModelBytes:
    chunks = rank_parameters(model, Coordinates(tp=0, pp=pp_rank, dp=0))
    plain = sum(one.num_bytes for chunk in chunks for one in chunk)
    count = sum(one.numel for chunk in chunks for one in chunk)
    if not model.is_trained:
        return ModelBytes(parameters=plain, weights=plain, num_parameters=count)
    frozen = sum(one.num_bytes for chunk in chunks for one in chunk if not one.is_trained)
    found = [
        (buffer, team)
        for chunk in chunks
        for team, held in ((dense, _of(chunk, experts=False)), (experts, _of(chunk, experts=True)))
        for buffer in buffers(held, team.size)
    ]
    return ModelBytes(
        parameters=plain,
        weights=frozen + sum(buffer.numel * ITEM_BYTES[buffer.dtype] for buffer, _ in found),
        gradients=sum(buffer.numel * GRADIENT_BYTES for buffer, _ in found),
        optimizer=sum(optimizer_bytes(buffer, team.size, team.rank) for buffer, team in found),
        num_parameters=count,
    )


def _of(parameters: Sequence[Parameter], *, experts: bool) -> list[Parameter]:
    return [one for one in parameters if one.is_expert == experts]


def optimizer_bytes(buffer: Buffer, dp: int, dp_rank: int) -> int:
    """Adam's state of a rank's part of a buffer: two moments, and a float32 copy of weights that are not float32."""
    master = MASTER_BYTES if buffer.dtype != "float32" else 0
    return buffer.shard(dp, dp_rank) * (MOMENT_BYTES + master)


def copy_bytes(model: PlannedModel, at: Coordinates, *, trains: bool) -> int:
    """Of the eight-bit copies that Transformer Engine's linears keep of their weights on a rank, without their scales.

    Passes that are trained on keep two of a weight: one for products over its columns, one over its rows.
    """
    linears = model.linears
    if not linears.is_te_fp8 or linears.is_frozen:
        return 0
    first = linears.fp8.num_layers_at_start_in_bf16
    end = model.architecture.num_layers - linears.fp8.num_layers_at_end_in_bf16
    found = 0
    for chunk, parameters in enumerate(rank_parameters(model, at)):
        layers = stage_layers(model.architecture, model.layout, at.pp, chunk)
        for one in parameters:
            words = one.name.split(".")
            if words[-2].startswith("linear_") and words[-1] == "weight" and first <= layers[int(words[2])] < end:
                found += one.numel
    return found * (2 if trains else 1)


def rank_parameters(model: PlannedModel, at: Coordinates) -> list[list[Parameter]]:
    """The parameters of each chunk of a rank, in megatron-core's order."""
    return [_chunk_parameters(model, at, chunk) for chunk in range(model.layout.vp)]


def _chunk_parameters(model: PlannedModel, at: Coordinates, chunk: int) -> list[Parameter]:
    family, held = FAMILIES[model.architecture.family], _shapes(model, at)
    found = []
    table = stage_weights(family, model.architecture, model.layout, at.pp, chunk, model.head, at.ep)
    for weight in table:
        shape, is_head = held[chunk, weight.local], weight.local.startswith("value_head.")
        is_tied = model.architecture.tied and model.head == "vocabulary" and model.layout.pp > 1
        is_shared = is_tied and weight.local in (family.embedding.local, family.output.local)
        is_trained = model.is_trained and (is_head or not model.lora.rank)
        dtype = "float32" if is_head else model.dtype
        found.append(
            Parameter(weight.local, num_elements(whole(shape)), dtype, is_trained, is_shared, bool(weight.expert))
        )
    if model.lora.rank:
        found += [adapter for weight in table for adapter in _adapters(model, weight, held[chunk, weight.local])]
    return sorted(found, key=lambda one: _place(one.name))


def _adapters(model: PlannedModel, weight: Weight, shape: tuple[int, ...]) -> list[Parameter]:
    """A [projections * r, columns] and B [rows, r] beside a weight [rows, columns]; see models/lora.py."""
    projections, rank = len(adapted(weight, model.lora)), model.lora.rank
    if not projections:
        return []
    stem, (rows, columns) = weight.local.removesuffix("weight") + "adapter.", shape
    return [
        Parameter(stem + "a", projections * rank * columns, model.dtype, model.is_trained, False),
        Parameter(stem + "b", rows * rank, model.dtype, model.is_trained, False),
    ]


def _shapes(model: PlannedModel, at: Coordinates) -> dict[tuple[int, str], tuple[int, ...]]:
    held = local_map(model.architecture, model.layout, at, model.head)
    return {key: tensor.shape for key, tensor in held.items()}


def _place(name: str) -> tuple[int, int, int]:
    """Sorts embedding, layers, final norm, head; in a layer by module. The sort is stable: a weight before its bias."""
    layer = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
    if layer is None:
        return (0 if name.startswith("embedding") else 2 if name.startswith("decoder") else 3, 0, 0)
    known = [place for place, module in enumerate(_MODULES) if layer[2].startswith(module + ".")]
    return (1, int(layer[1]), known[0] if known else len(_MODULES))


def buffers(parameters: Sequence[Parameter], dp: int) -> list[Buffer]:
    """The buffers of a chunk's trained parameters, one for each precision."""
    trained = [one for one in parameters if one.is_trained]
    kinds = dict.fromkeys(one.dtype for one in trained)
    return [_buffer(kind, [one for one in trained if one.dtype == kind], dp) for kind in kinds]


def _buffer(dtype: Precision, parameters: list[Parameter], dp: int) -> Buffer:
    places: list = []
    buckets: list = []
    opened = end = 0
    for one in reversed(parameters):
        start = _rounded(end, START_MULTIPLE)
        if one.has_own_bucket and start > opened:
            opened = start = _closed(buckets, opened, start, dp)
        end = start + one.numel
        places.append((start, end))
        if one.has_own_bucket:
            opened = end = _closed(buckets, opened, end, dp)
    if end > opened:
        _closed(buckets, opened, end, dp)
    return Buffer(dtype, tuple(places), tuple(buckets))


def _closed(buckets: list[tuple[int, int]], start: int, end: int, dp: int) -> int:
    """Adds the bucket from `start` to `end`, padded; returns where it ends."""
    buckets.append((start, _rounded(end, math.lcm(dp, BUCKET_MULTIPLE))))
    return buckets[-1][1]


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
