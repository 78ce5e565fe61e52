"""Other layouts of the same run on the same ranks, those that fit, the quickest first.

Each model's layouts are tried on their own first: what a layout needs and how long its stages take does not depend on
the other models. The combinations are then ordered by time, and the first ones are planned whole until enough fit. Of
those that differ in the critic only the quickest is shown.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from megarlhf.config.check import violations as setting_violations
from megarlhf.config.layout import Layout
from megarlhf.config.runs import AnyRun
from megarlhf.config.settings import Recompute
from megarlhf.errors import ConfigError
from megarlhf.loop.model_rules import model_violations
from megarlhf.loop.planner.gpus import gpu_violations
from megarlhf.loop.planner.models import PlannedModel, cast_of
from megarlhf.loop.planner.plan import GIB, Question, stage_seconds, total_seconds
from megarlhf.loop.planner.report import counted
from megarlhf.loop.planner.stages import Ranks
from megarlhf.loop.planner.step_time import Seconds
from megarlhf.loop.planner.workload import num_shards, workload_of
from megarlhf.models.architecture import layout_violations
from megarlhf.weights.plan import BUCKET_BYTES

MAX_CHOICES, MAX_TRIED = 10, 3000
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Way:
    """One model's layout, and what its backward pass recomputes (None where it is not trained)."""

    layout: Layout
    recompute: Recompute | None

    def flags(self, setting: str) -> Iterator[str]:
        """As the user would type it; `setting` is the layout's, such as actor.train."""
        for name in ("tp", "pp", "ep", "sp"):
            yield f"--{setting}.{name} {str(vars(self.layout)[name]).lower()}"
        if self.recompute is not None:
            yield f"--{setting.partition('.')[0]}.recompute {self.recompute}"


@dataclass(frozen=True)
class Choice:
    """One combination that fits."""

    ways: Mapping[str, Way]
    """By the layout's setting."""
    seconds: Seconds
    """Of a step, without the reshard."""
    peak_bytes: int

    def flags(self) -> str:
        """The settings that differ from one choice to another, for the command line."""
        return " ".join(flag for setting, way in self.ways.items() for flag in way.flags(setting))


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    question: Question
    choices: tuple[Choice, ...]
    """The quickest first."""
    num_tried: int

    def as_dict(self) -> dict[str, object]:
        """Plain values."""
        return {
            "tried": self.num_tried,
            "choices": [
                {"flags": one.flags(), "seconds": vars(one.seconds), "peak_bytes": one.peak_bytes}
                for one in self.choices
            ],
        }


def search(question: Question) -> Found:
    """The best layouts. Raises ConfigError for what no layout can mend, such as a model that is not found."""
    found: list[str] = []
    cast = cast_of(question.settings, question.architectures, found)
    found += gpu_violations(question.settings, question.gpu)
    if found:
        raise ConfigError(found)
    ways = {name: list(_ways(model, question)) for name, model in cast.models.items() if name != "reward"}
    if "reward" in cast.models and cast.models["reward"].is_trained:
        ways["reward"] = list(_ways(cast.models["reward"], question))
    ranked = {name: sorted(options, key=lambda pair: pair[1]) for name, options in ways.items()}
    names = list(ranked)
    combinations = sorted(
        product(*(ranked[name] for name in names)), key=lambda picked: sum(seconds for _, seconds in picked)
    )
    choices, tried, seen = [], 0, set()
    for picked in combinations[:MAX_TRIED]:
        ways_of = {name: way for name, (way, _) in zip(names, picked, strict=True)}
        leading = tuple(way for name, way in ways_of.items() if name != "critic")
        if leading in seen:  # shown with its best critic already
            continue
        tried += 1
        choice = _tried(question, cast.models, ways_of)
        if choice:
            seen.add(leading)
            choices.append(choice)
        if len(choices) == MAX_CHOICES:
            break
    return Found(question, tuple(sorted(choices, key=lambda one: one.seconds.likely)), tried)


def search_text(found: Found) -> str:
    """The choices, a line each, and the flags of the first."""
    question = found.question
    head = (
        f"megarlhf {question.command} on {counted(question.world_size, 'rank')} of {question.gpu.name} with "
        f"{question.memory_gib:g} GiB: {found.num_tried} combinations tried"
    )
    if not found.choices:
        return f"{head}, none fits; use more ranks, residency.idle: host, or less rollout.max_slots"
    lines = [head]
    for one in found.choices:
        parts = [
            f"{setting} {way.layout}" + (f" {way.recompute}" if way.recompute else "")
            for setting, way in one.ways.items()
        ]
        lines.append(f"  {one.seconds}  {one.peak_bytes / GIB:.1f} GiB  {'; '.join(parts)}")
    return "\n".join([*lines, "", f"The first one: {found.choices[0].flags()}"])


def _ways(model: PlannedModel, question: Question) -> Iterator[tuple[Way, float]]:
    """The layouts of one model that its rules allow, each with the time of its stages."""
    world_size, work = question.world_size, workload_of(question.settings)
    most = min(question.gpu.gpus_per_node, world_size)
    experts = _powers(most) if model.architecture.mixture else [1]
    for tp, pp, ep in product(_powers(most), _powers(world_size), experts):
        layout = Layout(tp=tp, pp=pp, ep=ep, sp=tp > 1 and model.name != "generator")
        if world_size % layout.smallest_world or (model.name == "generator" and tp % ep):
            continue
        if layout_violations(model.architecture, layout, model.setting):
            continue
        for recompute in RECOMPUTE if model.is_trained else (None,):
            one = replace(model, layout=layout, recompute=recompute or "none")
            ranks = Ranks(question.settings, {model.name: one, "actor": one}, work, world_size, question.gpu)
            seconds = stage_seconds(ranks, _stages_of(model), None)
            yield Way(layout, recompute), total_seconds(seconds).likely


def _stages_of(model: PlannedModel) -> list[str]:
    if not model.is_trained:
        return ["generate"]
    scored = {"actor": ["logp", "reference"], "critic": ["value"]}.get(model.name, [])
    return [*scored, f"learn_{model.name}"]


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _tried(question: Question, models: Mapping[str, PlannedModel], ways: Mapping[str, Way]) -> Choice | None:
    """The combination, planned on every rank, when it breaks no rule and fits."""
    settings = _with_ways(question.settings, models, ways)
    if setting_violations(settings, question.world_size):
        return None
    cast = cast_of(settings, question.architectures, [])
    if model_violations(settings, {name: model.architecture for name, model in cast.models.items()}):
        return None
    work = workload_of(settings, num_shards(settings, cast.models, question.world_size))
    ranks = Ranks(settings, cast.models, work, question.world_size, question.gpu, 2 * BUCKET_BYTES)
    rows = [ranks.stages_of(rank) for rank in range(question.world_size)]
    peak = max(stage.device for row in rows for stage in row)
    if peak > (question.memory_gib - question.reserve_gib) * GIB:
        return None
    seconds = stage_seconds(ranks, [stage.name for stage in rows[0]], None)
    return Choice({models[name].setting: way for name, way in ways.items()}, total_seconds(seconds), peak)


def _with_ways(settings: AnyRun, models: Mapping[str, PlannedModel], ways: Mapping[str, Way]) -> AnyRun:
    for name, way in ways.items():
        section, _, place = models[name].setting.partition(".")
        changes = {place: way.layout} | ({"recompute": way.recompute} if way.recompute else {})
        settings = replace(settings, **{section: replace(vars(settings)[section], **changes)})
    return settings
