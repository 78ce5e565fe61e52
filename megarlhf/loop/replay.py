"""Doing a kept step again, and how far everything on the way is from what the run had.

Each stage is given what the run's stage was given, not what came out of the replay so far: the first difference is at
its cause. Only the updates of a step build on each other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path

import torch

from megarlhf.algorithms.catalogue import ALGORITHMS
from megarlhf.checkpoints.capsule import Capsule
from megarlhf.checkpoints.discovery import checkpoint_at
from megarlhf.checkpoints.load import Checkpoint
from megarlhf.config.check import violations as setting_violations
from megarlhf.config.filled import filled
from megarlhf.config.replay import Tolerances
from megarlhf.config.runs import AnyRun, OnlineRun
from megarlhf.errors import CheckpointError
from megarlhf.loop.first_look import cast_violations
from megarlhf.loop.keeper import Keeper
from megarlhf.loop.offline import build_offline
from megarlhf.loop.online import build_online
from megarlhf.loop.preflight import machine_violations
from megarlhf.loop.roles import roles
from megarlhf.loop.run import Run
from megarlhf.loop.stopping import Stopping
from megarlhf.loop.tape import Learnt, learnt, weight_sketches
from megarlhf.parallel.rows import gather_objects
from megarlhf.records.experience import Experience
from megarlhf.residency.stages import GRADIENTS, OPTIMIZER, WEIGHTS
from megarlhf.telemetry.report import Reporter
from megarlhf.weights.local_map import hf_shapes
from megarlhf.weights.sketch import distances

_UNIT = {"logp_start": "nats", "logp_reference": "nats", "entropy": "nats"}
_TOLD = ("start", "num_rows", "num_ranks", "state", "learning_rates", "updates", "weights_before", "weights_after")
"""What a capsule's file must tell, beside the command."""
_CREDIT = ("reward", "token_reward", "advantage", "target")


@dataclass(frozen=True)
class Compared:
    """One thing that was computed again."""

    name: str
    gap: float
    """Largest difference; NaN where only one of the two is a number."""
    tolerance: float
    unit: str
    where: str
    """Of the largest difference, in words, with both values."""

    @property
    def passed(self) -> bool:
        return self.gap <= self.tolerance

    @property
    def numbers(self) -> dict[str, object]:
        """For programs; the gap is None where it is no number, or endless."""
        return {**vars(self), "gap": self.gap if isfinite(self.gap) else None, "passed": self.passed}


@dataclass(frozen=True)
class Recorded:
    """A source in place of sampling: the batch is the capsule's."""

    batch: Experience
    num_rows: int

    def next_batch(self, step: int) -> Experience:
        """The batch, whatever the step."""
        return self.batch


def replay_plan(settings: AnyRun, num_ranks: int, command: str) -> list[str]:
    """What is wrong with the settings, for so many ranks of this machine; their folder is not looked at."""
    cast = {name: role for name, role in roles(settings).items() if name != "generator"}
    found = setting_violations(settings, num_ranks, command) + machine_violations(settings)
    return list(dict.fromkeys(found + cast_violations(settings, cast)))


def require_whole(capsule: Capsule) -> None:
    """Raises CheckpointError where the capsule's file lacks something that a replay reads."""
    lacking = [name for name in _TOLD if name not in capsule.about]
    command = capsule.about.get("command")
    if lacking or command not in ALGORITHMS:
        what = f"it lacks {', '.join(lacking)}" if lacking else f"{command!r} is no training command"
        raise CheckpointError(f"the capsule of step {capsule.step} is damaged: {what}; choose another step")


def recorded_ranks(capsule: Capsule) -> int:
    """The number of ranks that the run had."""
    return int(capsule.about["num_ranks"])


def start_folder(capsule: Capsule, run_folder: Path) -> Path | None:
    """The checkpoint that the step begins at; None: the models' folders. Raises CheckpointError when it is gone."""
    start = capsule.about["start"]
    if not start:
        return None
    try:
        return checkpoint_at(run_folder / start)
    except CheckpointError as problem:
        raise CheckpointError(
            f"step {capsule.step} begins at a checkpoint that is not there any more: {problem}; run.keep_checkpoints "
            "says how many a run keeps"
        ) from problem


def replay(
    capsule: Capsule,
    settings: AnyRun,
    start: Path | None,
    world_size: int,
    skip: Sequence[str],
    allowed: Tolerances,
) -> Iterator[Compared]:
    """Every comparison, in the order of a step. Collective over the world: all ranks go through all of it."""
    command, about = capsule.about["command"], capsule.about
    settings, algorithm = filled(settings), ALGORITHMS[command]
    if isinstance(settings, OnlineRun):
        source = Recorded(capsule.scored, about["num_rows"])
        run = build_online(settings, algorithm, world_size, Reporter(()), source)
    else:
        run = build_offline(settings, algorithm, world_size, Reporter(()))
    if start is not None:
        Keeper(run, Stopping()).restore(Checkpoint(start))
    run.state = run.state.restored(about["state"])
    yield from _weights(run, about["weights_before"], "before", dict.fromkeys(run.learners, 0), capsule, allowed)
    yield from _scores(run, capsule, skip, allowed.score)
    yield from _credit(run, capsule, allowed.score)
    counts = {}
    for name in run.learners:
        recorded = [Learnt(**update) for update in about["updates"] if update["learner"] == name]
        counts[name] = len(recorded)
        yield from _updates(run, name, recorded, capsule, allowed)
    yield from _weights(run, about["weights_after"], "after", counts, capsule, allowed)
    run.residency.close()


def _scores(run: Run, capsule: Capsule, skip: Sequence[str], allowed: float) -> Iterator[Compared]:
    """What each scorer fills in."""
    judge = {} if run.judge is None else {"reward": run.judge}
    for name, scorer in ({**run.scorers} | judge).items():
        if name in skip:
            continue
        with run.resident(name, WEIGHTS):
            again = scorer.annotate(capsule.scored)
        run.reported.clear()
        for item in fields(again):
            was, now = vars(capsule.scored)[item.name], vars(again)[item.name]
            if isinstance(now, torch.Tensor) and now is not was and now.dtype == torch.float32:
                yield _field(item.name, capsule.scored, was, now, allowed)


def _credit(run: Run, capsule: Capsule, allowed: float) -> Iterator[Compared]:
    again = run.credit(capsule.scored)
    for name in _CREDIT:
        was, now = vars(capsule.credited)[name], vars(again)[name]
        if now is not None:
            yield _field(name, capsule.credited, was, now, allowed)


def _updates(
    run: Run, name: str, recorded: Sequence[Learnt], capsule: Capsule, allowed: Tolerances
) -> Iterator[Compared]:
    """As many updates as the run made, each with the weights that the replay has by then."""
    if not recorded:
        return
    learner, again = run.learners[name], []
    with run.resident(f"learn_{name}", WEIGHTS, GRADIENTS, OPTIMIZER):
        minibatches = run.minibatches(capsule.credited, capsule.step - 1)
        for _, minibatch in zip(recorded, minibatches, strict=False):
            again.append(learnt(name, learner.update(run.parts(name, minibatch))))
    losses = [(was.loss, now.loss, max(1.0, abs(was.loss))) for was, now in zip(recorded, again, strict=True)]
    yield _numbers(f"{name} loss", losses, allowed.loss)
    norms = [
        (was.gradient_norm, now.gradient_norm, was.gradient_norm) for was, now in zip(recorded, again, strict=True)
    ]
    yield _numbers(f"{name} gradient norm", norms, allowed.gradient)


def _numbers(name: str, pairs: Sequence[tuple[float, float, float]], allowed: float) -> Compared:
    """(recorded, again, what it is relative to) of each update."""
    gaps = [0.0 if was == now else abs(now - was) / scale if scale else float("inf") for was, now, scale in pairs]
    worst = _worst(gaps)
    was, now, _ = pairs[worst]
    return Compared(
        name, gaps[worst], allowed, "relative", f"update {worst + 1} of {len(pairs)}: {was:.6g}, now {now:.6g}"
    )


def _worst(gaps: Sequence[float]) -> int:
    """Place of the largest, a NaN being the largest of all."""
    return max(range(len(gaps)), key=lambda place: (gaps[place] != gaps[place], gaps[place]))


def _field(name: str, batch: Experience, was: torch.Tensor | None, now: torch.Tensor, allowed: float) -> Compared:
    """A tensor of the record: its largest difference at a valid token, or row."""
    unit = _UNIT.get(name, "")
    if was is None:
        return Compared(name, float("nan"), allowed, unit, "the run had none")
    counts = batch.mask if now.dim() == 2 and now.shape == batch.mask.shape else batch.mask.any(dim=1)
    same = (was == now) | (was.isnan() & now.isnan())
    gaps = torch.where(same, 0.0, (was.double() - now.double()).abs())
    gaps = torch.where(counts if gaps.dim() == counts.dim() else counts[:, None], gaps, 0.0)
    worst = int(gaps.nan_to_num(torch.inf, torch.inf).argmax())
    row, *column = (int(place) for place in torch.unravel_index(torch.tensor(worst), gaps.shape))
    place = f"row {row} (of the data {int(batch.row_id[row])})" + "".join(f", token {at + 1}" for at in column)
    values = f"{float(was.flatten()[worst]):.6g}, now {float(now.flatten()[worst]):.6g}"
    return Compared(name, float(gaps.flatten()[worst]), allowed, unit, f"{place}: {values}")


def _weights(
    run: Run,
    recorded: Mapping[str, Mapping[str, Sequence[float]]],
    when: str,
    num_updates: Mapping[str, int],
    capsule: Capsule,
    allowed: Tolerances,
) -> Iterator[Compared]:
    """By learner the tensor that is farthest off, in learning rates times updates of the step."""
    for name, found in weight_sketches(run).items():
        model, rate = run.learners[name].model, capsule.about["learning_rates"][name]
        if recorded[name].keys() != found.keys():
            yield Compared(
                f"{name} weights {when}", float("nan"), allowed.weight, "rates", "other tensors than the run's"
            )
            continue
        gaps = distances(recorded[name], found, hf_shapes(model.architecture, model.head))
        names = list(gaps)
        scale = max(1, num_updates[name]) * (rate or 1.0)
        worst = _worst([gaps[tensor] for tensor in names])
        yield Compared(f"{name} weights {when}", gaps[names[worst]] / scale, allowed.weight, "rates", f"{names[worst]}")


def heading() -> str:
    """Head of the table."""
    return f"{'computed again':26}{'difference':>12}{'allowed':>10}  {'unit':9} largest at"


def line(compared: Compared) -> str:
    """A row of the table."""
    mark = " " if compared.passed else "!"
    numbers = f"{compared.gap:>11.1e}{mark}{compared.tolerance:>10.1e}"
    return f"{compared.name:26}{numbers}  {compared.unit:9} {compared.where if compared.gap else 'nowhere'}"


def verdict(found: Sequence[Compared]) -> str:
    """The last line: whether all agree, else the first that does not."""
    failed = [one for one in found if not one.passed]
    if not failed:
        return f"{len(found)} compared, all agree"
    first = failed[0]
    return f"{len(found)} compared, {len(failed)} differ; the first is {first.name}, {first.where}"


def is_everywhere(found: Sequence[Compared]) -> bool:
    """Whether all agree on every rank. Collective over the world."""
    return all(gather_objects(all(one.passed for one in found)))
