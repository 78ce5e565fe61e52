"""Where the time of a profiled step went: by stage, by kind of work, and what cost most. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

STEP, STAGE = "step", "stage "
KINDS = ("forward", "backward", "optimizer", "sample", "communicate")
"""Work that every program would have to do. What else a stage takes is the framework's own."""
_COLLECTIVES = ("c10d::", "gloo:", "nccl:", "ncclDevKernel")
_NUM_TOP = 8

Interval = tuple[float, float]


@dataclass(frozen=True)
class Event:
    """A call in a trace, or a label of `device.labels` without its prefix."""

    name: str
    start_us: float
    end_us: float
    self_us: float
    """Without the calls inside it."""
    is_label: bool = False
    on_device: bool = False
    """It ran on a GPU."""


@dataclass(frozen=True)
class StageCosts:
    """One stage of a step, or the whole step. Seconds."""

    name: str
    seconds: float
    kinds: dict[str, float]
    """By kind of work; one that happens inside another counts for the outer one only."""
    framework_s: float
    top: list[tuple[str, float, int]]
    """(operation, seconds without the operations inside it, calls) of what cost most; of a GPU its kernels."""


def costs(events: Sequence[Event]) -> list[StageCosts]:
    """The step first, then its stages in the order in which they began; a stage that came several times is one."""
    labels = sorted((one for one in events if one.is_label), key=lambda one: (one.start_us, -one.end_us))
    work = _outermost(labels, [one for one in events if one.name.startswith(_COLLECTIVES)])
    places: dict[str, list[Interval]] = defaultdict(list)
    for label in labels:
        if label.name == STEP or label.name.startswith(STAGE):
            places[label.name.removeprefix(STAGE)].append((label.start_us, label.end_us))
    calls = sorted((one for one in events if not one.is_label or one.name in KINDS), key=lambda one: one.start_us)
    return [_of_stage(name, where, work, calls) for name, where in places.items()]


def _outermost(labels: Iterable[Event], collectives: Iterable[Event]) -> list[Event]:
    """Stretches of work that lie in no other one; a collective counts where no label says more."""
    found: list[Event] = []
    named = [one for one in labels if one.name in KINDS]
    named += [Event("communicate", one.start_us, one.end_us, 0.0) for one in collectives]
    reached = float("-inf")
    for one in sorted(named, key=lambda each: (each.start_us, -each.end_us)):
        if one.end_us > reached:
            found.append(Event(one.name, max(one.start_us, reached), one.end_us, 0.0))
            reached = one.end_us
    return found


def _of_stage(name: str, where: Sequence[Interval], work: Sequence[Event], calls: Sequence[Event]) -> StageCosts:
    kinds = dict.fromkeys(KINDS, 0.0)
    for one in work:
        kinds[one.name] += 1e-6 * sum(max(0.0, min(one.end_us, end) - max(one.start_us, start)) for start, end in where)
    seconds = 1e-6 * sum(end - start for start, end in where)
    inside = [one for one in calls if any(start <= one.start_us < end for start, end in where)]
    on_device = [one for one in inside if one.on_device and not one.is_label]
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for one in on_device or inside:
        total = totals[f"Python of {one.name}" if one.is_label else one.name]
        total[0] += 1e-6 * one.self_us
        total[1] += 1
    top = sorted(totals.items(), key=lambda item: -item[1][0])[:_NUM_TOP]
    return StageCosts(
        name=name,
        seconds=seconds,
        kinds={kind: taken for kind, taken in kinds.items() if taken},
        framework_s=max(0.0, seconds - sum(kinds.values())),
        top=[(operation, taken, int(count)) for operation, (taken, count) in top],
    )


def rows(found: Sequence[StageCosts]) -> list[dict[str, Any]]:
    """As plain values, for a JSON file."""
    return [asdict(one) for one in found]


def markdown(found: Sequence[StageCosts]) -> str:
    """A table of the stages, then a line for each with what cost most in it."""
    lines = ["| stage | seconds | " + " | ".join(KINDS) + " | framework |", "|---" * (len(KINDS) + 3) + "|"]
    for one in found:
        shares = [f"{one.kinds[kind] / one.seconds:.1%}" if kind in one.kinds else "" for kind in KINDS]
        framework = f"{one.framework_s / one.seconds:.1%}" if one.seconds else ""
        lines.append(f"| {one.name} | {one.seconds:.3f} | {' | '.join(shares)} | {framework} |")
    lines += ["", *(f"- {one.name}: {top_costs(one)}" for one in found)]
    return "\n".join(lines) + "\n"


def top_costs(one: StageCosts, count: int = _NUM_TOP) -> str:
    """`aten::mm 61% (364 calls), ...`: shares of the stage's time."""
    found = [(name, taken, calls) for name, taken, calls in one.top[:count] if taken >= 0.005 * one.seconds]
    return ", ".join(f"{name} {taken / one.seconds:.0%} ({calls} calls)" for name, taken, calls in found)
