"""A recipe on more and more ranks: how long a step takes, and what share of it is not the models' own work.

Two ways to grow: the batch grows with the ranks, so that each has as much to do as in the recipe, and by whole factors
its shards do too, so that each holds as many rows; or the batch stays. Layouts stay; ranks that are added are further
copies of the models. The reshard is counted message by message up to 64 ranks; with more, a rank is taken to send as
much as with the most that were counted.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from megarlhf.config.runs import AnyRun, OnlineRun
from megarlhf.loop.planner.gpus import LIKELY
from megarlhf.loop.planner.plan import Plan, Question, make_plan, stage_s
from megarlhf.loop.planner.reshard import ReshardSummary
from megarlhf.loop.planner.stages import Ranks
from megarlhf.loop.planner.step_time import Parts

_COUNTED_RANKS = 64
_PARTS = ("tensor", "pipeline", "data", "moving", "rows")


@dataclass(frozen=True)
class Point:
    """The recipe on a number of ranks."""

    ranks: int
    batch: int
    """Prompts of a step, or sequences of a data set."""
    grows: bool
    """The batch has as many rows a rank as in the recipe."""
    parts: Parts | None
    """Of a whole step, at the likely efficiency; None where it cannot be run so."""
    problem: str = ""
    """Why not."""


def scale(question: Question, ranks: Sequence[int]) -> list[Point]:
    """Points for each number of ranks, the batch growing and staying; the recipe is `question`, on its world size."""
    found, reshard = [], None
    for number in sorted(set(ranks)):
        for grows in (True, False):
            batch = batch_of(question.settings)
            times = number // question.world_size if grows and number > question.world_size else 1
            batch = batch * number // question.world_size if grows else batch
            asked = replace(
                question,
                settings=with_batch(question.settings, batch, times),
                world_size=number,
                follow_reshard=number <= _COUNTED_RANKS,
            )
            plan = make_plan(asked)
            reshard = plan.reshard or reshard
            found.append(_point(plan, batch, grows, reshard))
    return found


def batch_of(settings: AnyRun) -> int:
    """Prompts of a step, or rows where a run reads a data set."""
    return settings.rollout.batch_size if isinstance(settings, OnlineRun) else settings.data.batch_size


def with_batch(settings: AnyRun, batch: int, times: int = 1) -> AnyRun:
    """The same run with another batch, in so many times the shards."""
    if isinstance(settings, OnlineRun):
        shards = settings.rollout.shards * times
        return replace(settings, rollout=replace(settings.rollout, batch_size=batch, shards=shards))
    return replace(settings, data=replace(settings.data, batch_size=batch))


def _point(plan: Plan, batch: int, grows: bool, reshard: ReshardSummary | None) -> Point:
    question = plan.question
    if not plan.stages:
        return Point(question.world_size, batch, grows, None, plan.violations[0].partition(";")[0])
    if not plan.fits:
        return Point(question.world_size, batch, grows, None, "it does not fit")
    ranks = Ranks(question.settings, plan.cast.models, plan.work, question.world_size, question.gpu)
    parts = [stage_s(ranks, stage.name, reshard, LIKELY) for stage in plan.stages]
    return Point(question.world_size, batch, grows, sum(parts, Parts()))


def as_dicts(points: Sequence[Point]) -> list[dict]:
    """Plain values."""
    return [asdict(point) | {"overhead": point.parts.overhead if point.parts else None} for point in points]


def scale_text(points: Sequence[Point]) -> str:
    """Two Markdown tables; parts in seconds."""
    lines = []
    for grows, title in ((True, "The batch grows with the ranks:"), (False, "The batch stays:")):
        lines += [
            title,
            "",
            "| ranks | batch | step, s | models' own work, s | not their own work | " + " | ".join(_PARTS),
        ]
        lines[-1] += " |"
        lines.append("|---" * (5 + len(_PARTS)) + "|")
        lines += [_line(point) for point in points if point.grows == grows]
        lines.append("")
    return "\n".join(lines)


def _line(point: Point) -> str:
    parts = point.parts
    if parts is None:
        return f"| {point.ranks} | {point.batch} | {point.problem} |" + " |" * (2 + len(_PARTS))
    shown = " | ".join(f"{getattr(parts, name):.2f}" for name in _PARTS)
    return (
        f"| {point.ranks} | {point.batch} | {parts.total:.1f} | {parts.compute:.1f} | {parts.overhead:.1%} | {shown} |"
    )
