"""A plan: everything that can be said about a run on a number of ranks before there is any."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megarlhf.config.check import violations as setting_violations
from megarlhf.config.runs import AnyRun, OnlineRun
from megarlhf.loop.model_rules import model_violations
from megarlhf.loop.planner.cache import cache_bytes
from megarlhf.loop.planner.gpus import GPU, Efficiency, gpu_violations
from megarlhf.loop.planner.models import Cast, cast_of, uncounted
from megarlhf.loop.planner.reshard import ReshardSummary, reshard_summary
from megarlhf.loop.planner.sizes import MASTER_BYTES, MOMENT_BYTES, ModelBytes, model_bytes
from megarlhf.loop.planner.stages import Ranks, StageBytes
from megarlhf.loop.planner.step_time import (
    NO_TIME,
    Machine,
    Parts,
    Seconds,
    estimate,
    generate_s,
    learn_s,
    reshard_s,
    score_s,
)
from megarlhf.loop.planner.workload import Workload, num_shards, workload_of
from megarlhf.models.precision.linears import te_violations
from megarlhf.parallel.grid import Coordinates
from megarlhf.weights.boxes import num_elements, whole
from megarlhf.weights.local_map import hf_shapes
from megarlhf.weights.plan import BUCKET_BYTES
from megarlhf.weights.transfers import ITEM_BYTES

GIB = 2**30
RESERVE_GIB = 4.0
"""Kept free on a GPU: CUDA's context, NCCL's buffers, what the allocator cannot use."""


@dataclass(frozen=True)
class Question:
    """What is planned for."""

    command: str
    settings: AnyRun
    world_size: int
    gpu: GPU
    memory_gib: float
    architectures: Path
    """Folder of architecture files."""
    reserve_gib: float = RESERVE_GIB
    validate: bool = False
    """Check the reshard plan element by element."""
    follow_reshard: bool = True
    """Count the reshard message by message, which takes most of a plan's time; else its buffers are taken at their
    limit, and its time is left out."""


@dataclass(frozen=True)
class Plan:
    """The answer. Without `stages` the violations kept it from being counted."""

    question: Question
    cast: Cast
    work: Workload
    violations: tuple[str, ...]
    """Rules that the settings break, each with a fix."""
    stages: tuple[StageBytes, ...] = ()
    """Of the rank that needs the most, stage by stage the fullest one's."""
    fullest: Mapping[str, int] | None = None
    """The rank of each row of `stages`."""
    host_bytes: int = 0
    """Of the fullest rank."""
    host_node_bytes: int = 0
    """Of the fullest node."""
    reshard: ReshardSummary | None = None
    seconds: Mapping[str, Seconds] | None = None
    """By stage."""
    exports: Mapping[str, int] | None = None
    """Bytes of each trained model's Hugging Face folder."""
    states: Mapping[str, int] | None = None
    """Bytes of each trained model with its optimizer's state, over all ranks: what resuming needs."""

    @property
    def peak_bytes(self) -> int:
        """Most that any rank holds at any stage."""
        return max((stage.device for stage in self.stages), default=0)

    @property
    def usable_bytes(self) -> float:
        """Memory of a rank without the reserve."""
        return (self.question.memory_gib - self.question.reserve_gib) * GIB

    @property
    def fits(self) -> bool:
        """Every stage fits every rank."""
        return bool(self.stages) and self.peak_bytes <= self.usable_bytes


def make_plan(question: Question) -> Plan:
    """The plan. Nothing is raised for settings that cannot be run: they are violations of the plan."""
    settings = question.settings
    found: list[str] = []
    cast = cast_of(settings, question.architectures, found)
    found += setting_violations(settings, question.world_size, f"{question.command} FILE.yaml")
    found += model_violations(settings, {name: model.architecture for name, model in cast.models.items()})
    found += gpu_violations(settings, question.gpu)
    for model in cast.models.values():
        found += te_violations(model.linears, model.architecture, model.layout, model.setting) + uncounted(model)
    violations = tuple(dict.fromkeys(found))
    plan = partial(Plan, question=question, cast=cast, work=workload_of(settings), violations=violations)
    is_whole = all(model.name in cast.models for model in cast.models.values()) and len(cast.models) > 0
    if found or not is_whole:
        return plan()
    return _counted(plan, question, cast)


def _counted(plan: Callable[..., Plan], question: Question, cast: Cast) -> Plan:
    models, world_size, gpu = cast.models, question.world_size, question.gpu
    reshard = None
    is_view = isinstance(question.settings, OnlineRun) and question.settings.residency.generator == "view"
    if "generator" in models and not is_view and question.follow_reshard:
        reshard = reshard_summary(
            models["actor"], models["generator"], world_size, gpu.gpus_per_node, check=question.validate
        )
    work = workload_of(question.settings, num_shards(question.settings, models, world_size))
    buckets = reshard.peak_extra_bytes if reshard else 0 if question.follow_reshard else 2 * BUCKET_BYTES
    ranks = Ranks(question.settings, models, work, world_size, gpu, buckets)
    rows = [ranks.stages_of(rank) for rank in range(world_size)]
    fullest, stages = {}, []
    for place, stage in enumerate(rows[0]):
        rank = max(range(world_size), key=lambda rank: rows[rank][place].device)  # noqa: B023
        fullest[stage.name] = rank
        stages.append(rows[rank][place])
    hosts = [max(stage.host for stage in row) for row in rows]
    per_node = [sum(hosts[first : first + gpu.gpus_per_node]) for first in range(0, world_size, gpu.gpus_per_node)]
    trained = [name for name, model in models.items() if model.is_trained]
    return plan(
        work=work,
        stages=tuple(stages),
        fullest=fullest,
        host_bytes=max(hosts),
        host_node_bytes=max(per_node),
        reshard=reshard,
        seconds=stage_seconds(ranks, [stage.name for stage in stages], reshard),
        exports={name: _export_bytes(cast, name) for name in trained},
        states={name: _state_bytes(cast, name) for name in trained},
    )


def stage_seconds(ranks: Ranks, stages: list[str], reshard: ReshardSummary | None) -> dict[str, Seconds]:
    """The time of each stage of a step, without what moves between device and host."""
    found = {}
    for stage in stages:
        found[stage] = estimate(partial(stage_s, ranks, stage, reshard))
    return found


def total_seconds(seconds: Mapping[str, Seconds]) -> Seconds:
    """Of a whole step."""
    return sum(seconds.values(), NO_TIME)


def stage_s(ranks: Ranks, stage: str, reshard: ReshardSummary | None, efficiency: Efficiency) -> Parts:
    """The time of one stage by what it goes to."""
    machine = Machine(ranks.gpu, efficiency, ranks.world_size)
    if stage == "reshard":
        return reshard_s(reshard, machine) if reshard else Parts()
    if stage == "generate":
        model = ranks.models.get("generator", ranks.models["actor"])
        size, dp = _largest(ranks, model.name), ranks.dp(model.name)
        stages = range(model.layout.pp)
        slots, length = ranks.work.slots(dp), ranks.work.length
        cache = max(cache_bytes(model, stage, slots, length, on_gpu=ranks.gpu.is_gpu) for stage in stages)
        return generate_s(model, size, cache, ranks.work, machine)
    name = {"logp": "actor", "reference": "actor", "value": "critic"}.get(stage, stage.removeprefix("learn_"))
    model = ranks.models[name]
    if stage.startswith("learn_"):
        return learn_s(model, _largest(ranks, name), ranks.work, machine)
    return score_s(model, ranks.work, machine)


def _largest(ranks: Ranks, name: str) -> ModelBytes:
    """Of the stage with the most weights."""
    model, dp = ranks.models[name], ranks.dp(name)
    sizes = [model_bytes(model, Coordinates(tp=0, pp=stage, dp=0), dp) for stage in range(model.layout.pp)]
    return max(sizes, key=lambda size: size.weights)


def _export_bytes(cast: Cast, name: str) -> int:
    """Of the Hugging Face folder that is written of a model, without its headers."""
    model = cast.models[name]
    shapes = hf_shapes(model.architecture, model.head)
    return sum(num_elements(whole(shape)) * ITEM_BYTES[model.dtype] for shape in shapes.values())


def _state_bytes(cast: Cast, name: str) -> int:
    """Weights, moments and, under bfloat16, float32 masters; adapters train too little to count the model's."""
    model = cast.models[name]
    weights = _export_bytes(cast, name)
    if model.lora.rank:
        return weights
    count = weights // ITEM_BYTES[model.dtype]
    return weights + count * (MOMENT_BYTES + (MASTER_BYTES if model.dtype != "float32" else 0))
