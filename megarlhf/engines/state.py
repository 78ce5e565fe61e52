"""A learner's state for a checkpoint, and back: weights, main weights, moments and counters, under any layout.

megarlhf names what it saves by Hugging Face tensors: `actor.weight.NAME`, `actor.exp_avg.NAME`, `actor.exp_avg_sq.NAME`
(PEFT's names for adapters). With adapters only what is trained is saved: the rest is in the folder that the run
started from.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from megarlhf.checkpoints.load import Checkpoint
from megarlhf.checkpoints.shards import NamedBox, named_boxes, speakers, wanted_boxes
from megarlhf.config.lora import LoRA
from megarlhf.engines.learner import Learner
from megarlhf.models.build import Model
from megarlhf.models.precision import te
from megarlhf.models.precision.emulated import named_states
from megarlhf.models.precision.recipe import History
from megarlhf.parallel.grid import Coordinates
from megarlhf.parallel.rows import gather_objects
from megarlhf.residency.average import Average
from megarlhf.weights.adapters import adapter_map, adapter_shapes
from megarlhf.weights.boxes import Box, LocalTensor
from megarlhf.weights.local_map import Key, hf_shapes, local_map

_MOMENTS = ("exp_avg", "exp_avg_sq")
WEIGHT = "weight"


@dataclass(frozen=True)
class Holdings:
    """What each rank holds of a model's parameters, and what this rank writes of them."""

    mine: Mapping[Key, LocalTensor]
    shapes: Mapping[str, tuple[int, ...]]
    spoken_for: Mapping[Key, set[tuple[str, Box]]]
    """By parameter the (tensor, box) that this rank's data-parallel group writes."""
    led: frozenset[Key]
    """Parameters whose group this rank is the first of: it writes what the group does not share out."""


def trained_holdings(model: Model, lora: LoRA) -> Holdings:
    """Of the trained parameters: all of them, or adapters and value head."""
    if not lora.rank:
        return _holdings(model, lambda at: _base(model, at), hf_shapes(model.architecture, model.head))
    shapes = adapter_shapes(model.architecture, model.head, lora)
    return _holdings(model, lambda at: _adapters(model, at, lora), shapes)


def _base(model: Model, at: Coordinates) -> dict[Key, LocalTensor]:
    return local_map(model.architecture, model.groups.layout, at, model.head)


def _adapters(model: Model, at: Coordinates, lora: LoRA) -> dict[Key, LocalTensor]:
    return adapter_map(model.architecture, model.groups.layout, at, model.head, lora)


def _holdings(model: Model, held_at, shapes: Mapping[str, tuple[int, ...]]) -> Holdings:
    groups = model.groups
    held = [held_at(at) for at in groups.grid.all_coordinates()]
    mine: dict[Key, set[tuple[str, Box]]] = {key: set() for key in held[groups.rank]}
    led: set[Key] = set()
    for axis, of_experts in (("dp_cp", False), ("expt_dp", True)):  # whose optimizers share a parameter out
        part = [{key: tensor for key, tensor in one.items() if is_expert(key) is of_experts} for one in held]
        for key, name, box in speakers(part, groups.grid.groups(axis))[groups.rank]:
            mine[key].add((name, box))
        if min(groups.ranks(axis)) == groups.rank:
            led |= part[groups.rank].keys()
    return Holdings(held[groups.rank], shapes, mine, frozenset(led))


def is_expert(key: Key) -> bool:
    """The parameter is an expert's, whose replicas are other ranks than those of the other weights."""
    return ".mlp.experts." in key[1]


@dataclass(frozen=True)
class _Shard:
    """This rank's stretch of one parameter in the optimizer."""

    key: Key
    start: int
    main: torch.nn.Parameter
    """float32, flat; a view of the parameter where that is float32 too."""
    adam: torch.optim.Optimizer


def _shards(learner: Learner) -> Iterator[_Shard]:
    keys = {id(parameter): key for key, parameter in learner.model.named_parameters().items()}
    for part in learner.optimizer.chained_optimizers:
        # Not by model_param_group_index_map: it is wrong in a group of both types (a bfloat16 model's value head).
        pairs = (
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        )
        for parameters, mains in ((chain(*ours), chain(*shards)) for ours, shards in pairs):
            for parameter, main in zip(parameters, mains, strict=True):
                stretch = part._get_model_param_range_map(parameter)["param"]
                assert main.numel() == stretch.size, f"{keys[id(parameter)]}: a shard of another size than its stretch"
                yield _Shard(keys[id(parameter)], stretch.start, main, part.optimizer)


def learner_shapes(name: str, holdings: Holdings) -> dict[str, tuple[int, ...]]:
    """Every tensor of a learner's state."""
    kinds = (WEIGHT, *_MOMENTS)
    return {f"{name}.{kind}.{tensor}": shape for kind in kinds for tensor, shape in holdings.shapes.items()}


def learner_boxes(name: str, learner: Learner, holdings: Holdings) -> Iterator[NamedBox]:
    """This rank's share of a learner's state, copied to host memory box by box."""
    for shard in _shards(learner):
        state = shard.adam.state[shard.main] if shard.main in shard.adam.state else {}
        tensor, spoken_for = holdings.mine[shard.key], holdings.spoken_for[shard.key]
        flat = shard.main.detach().view(-1)
        for kind in (WEIGHT, *_MOMENTS):
            values = flat if kind == WEIGHT else state[kind].view(-1) if kind in state else torch.zeros_like(flat)
            for box in named_boxes(tensor, values, shard.start, spoken_for):
                yield NamedBox(f"{name}.{kind}.{box.name}", box.box, box.values.to("cpu", copy=True).contiguous())


@torch.no_grad()
def restore_learner(name: str, learner: Learner, holdings: Holdings, checkpoint: Checkpoint, numbers: Mapping) -> None:
    """Weights, moments and counters (`learner_numbers`) as they were saved, under this run's layout.

    Padding rows stay zero, and so do their moments: their gradient is.
    """
    parameters = learner.model.named_parameters()
    for key, tensor in holdings.mine.items():
        flat = parameters[key].detach().view(-1)
        for box in wanted_boxes(tensor, flat, 0):
            checkpoint.fill(box.values, f"{name}.{WEIGHT}.{box.name}", box.box)
    for shard in _shards(learner):
        moments = {kind: torch.zeros_like(shard.main).view(-1) for kind in _MOMENTS}
        for kind, values in {WEIGHT: shard.main.detach().view(-1), **moments}.items():
            for box in wanted_boxes(holdings.mine[shard.key], values, shard.start):
                checkpoint.fill(box.values, f"{name}.{kind}.{box.name}", box.box)
        _set_state(shard, {kind: values.view_as(shard.main) for kind, values in moments.items()}, numbers["updates"])
    learner.model.weights_changed()
    _restore_scales(learner, numbers["fp8"])
    learner.num_updates = numbers["updates"]
    learner.num_skipped = numbers["skipped"]
    learner.skipped_in_a_row = numbers["skipped_in_a_row"]


def _set_state(shard: _Shard, moments: dict[str, torch.Tensor], updates: int) -> None:
    """torch's AdamW counts steps per parameter, fused ones per group."""
    state = shard.adam.state[shard.main]
    state |= moments
    if isinstance(shard.adam, torch.optim.Adam):
        state["step"] = torch.tensor(float(updates), device=shard.main.device)  # fused: beside the moments
    else:
        for group in shard.adam.param_groups:
            group["step"] = updates


def _histories(learner: Learner) -> Iterator[tuple[str, History]]:
    """Of delayed FP8 scaling on this rank, under names that hold for every layout; the same on a stage's ranks."""
    for chunk in learner.model.chunks:
        for layer in chunk.decoder.layers:
            for name, state in named_states(layer):
                if state.histories is not None:
                    for operand in ("input", "weight", "gradient"):
                        yield f"{layer.layer_number}.{name}.{operand}", vars(state.histories)[operand]


def _te_scales(learner: Learner) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Of Transformer Engine's delayed scaling on this rank, likewise: it reduces them over all ranks."""
    for chunk in learner.model.chunks:
        for layer in chunk.decoder.layers:
            for name, tensors in te.named_scales(layer):
                yield f"{layer.layer_number}.{name}", tensors


def _restore_scales(learner: Learner, saved: Mapping[str, Sequence]) -> None:
    for name, history in _histories(learner):
        history.scale, history.largest = saved[name][0], list(saved[name][1])
    if not saved or learner.model.linears.layers != "te":
        return
    for chunk in learner.model.chunks:
        for layer in chunk.decoder.layers:
            te.make_scales(layer, learner.model.config)
    for name, tensors in _te_scales(learner):
        for tensor, values in zip(tensors, saved[name], strict=True):
            tensor.copy_(torch.tensor(values))


def learner_numbers(learner: Learner) -> dict[str, Any]:
    """Counters of a learner, and the scales of delayed FP8 scaling. Collective over the world."""
    mine: dict[str, list] = {name: [history.scale, history.largest] for name, history in _histories(learner)}
    mine |= {name: [tensor.tolist() for tensor in tensors] for name, tensors in _te_scales(learner)}
    scales = gather_objects(mine, learner.model.groups.world)
    return {
        "fp8": {name: value for found in scales for name, value in found.items()},
        "updates": learner.num_updates,
        "skipped": learner.num_skipped,
        "skipped_in_a_row": learner.skipped_in_a_row,
    }


def average_shapes(name: str, holdings: Holdings) -> dict[str, tuple[int, ...]]:
    """Every tensor of an average."""
    return {f"{name}.{tensor}": shape for tensor, shape in holdings.shapes.items()}


def average_boxes(name: str, average: Average, holdings: Holdings) -> Iterator[NamedBox]:
    """This rank's share of an average, of which every rank of a parameter's group holds all: the first one writes."""
    for key, values in ((key, average.host[key]) for key in average.host if key in holdings.led):
        for box in named_boxes(holdings.mine[key], values.view(-1), 0, holdings.spoken_for[key]):
            yield NamedBox(f"{name}.{box.name}", box.box, box.values.clone())


def restore_average(name: str, average: Average, holdings: Holdings, checkpoint: Checkpoint) -> None:
    """The average as it was saved."""
    for key, values in average.host.items():
        for box in wanted_boxes(holdings.mine[key], values.view(-1), 0):
            checkpoint.fill(box.values, f"{name}.{box.name}", box.box)
