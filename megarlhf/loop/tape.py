"""What a step that is to be kept goes through: the run takes it down as it happens; at its end it is a capsule."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megarlhf.checkpoints.capsule import Capsule
from megarlhf.config.load import to_yaml
from megarlhf.device.versions import versions
from megarlhf.parallel.shards import RankedShard
from megarlhf.records.experience import Experience
from megarlhf.records.joining import join
from megarlhf.records.metrics import metric_results
from megarlhf.residency.stages import WEIGHTS, Tenant
from megarlhf.weights.sketch import weight_sketch

if TYPE_CHECKING:  # the run has a tape
    from megarlhf.engines.learner import Update
    from megarlhf.loop.run import Run


@dataclass(frozen=True)
class Learnt:
    """One update: which learner's, the sum of its losses, gradient norm before clipping, and whether it was applied."""

    learner: str
    loss: float
    gradient_norm: float
    applied: bool


@dataclass
class Tape:
    """A step so far."""

    start: str
    """The checkpoint that it begins at; empty: the model folders."""
    weights: Mapping[str, Mapping[str, list[float]]]
    """Before the step: sketches by learner."""
    learning_rates: Mapping[str, float]
    """Of the step's first update, by learner."""
    state: Mapping[str, float] = field(default_factory=dict)
    """Of the algorithm, before credit."""
    scored: Experience | None = None
    credited: Experience | None = None
    updates: list[Learnt] = field(default_factory=list)

    def learn(self, name: str, update: "Update") -> None:
        """Takes down an update."""
        self.updates.append(learnt(name, update))


def learnt(name: str, update: "Update") -> Learnt:
    """What is kept of an update of the learner `name`."""
    loss = sum(value for key, value in metric_results(update.metrics).items() if key.startswith("loss/"))
    return Learnt(name, loss, update.gradient_norm, update.applied)


def begin_tape(run: "Run", start: str) -> Tape:
    """For the step that comes next. Collective over the world."""
    rates = {name: learner.learning_rate for name, learner in run.learners.items()}
    return Tape(start, weight_sketches(run), rates)


def capsule_of(run: "Run", tape: Tape, step: int) -> Capsule:
    """What there is to keep, after step number `step`. Collective over the world."""
    assert tape.scored is not None and tape.credited is not None, "a tape is for one whole step"
    about: dict[str, Any] = {
        "command": run.algorithm.name,
        "start": tape.start,
        "num_rows": run.source.num_rows,
        "num_ranks": dist.get_world_size(),
        "seed": run.settings.run.seed,
        "state": dict(tape.state),
        "learning_rates": dict(tape.learning_rates),
        "updates": [asdict(update) for update in tape.updates],
        "weights_before": tape.weights,
        "weights_after": weight_sketches(run),
        "versions": versions(),
    }
    scored, credited = _whole(tape.scored, tape.credited, run.shard)
    return Capsule(step, scored, credited, about, to_yaml(run.settings))


def _whole(scored: Experience, credited: Experience, shard: RankedShard) -> tuple[Experience, Experience]:
    """Both with the rows of all shards; what credit left alone stays one tensor. Collective over the world."""
    if shard.count == 1:
        return scored, credited
    texts = {"responses": tuple(scored.responses)}  # they would take the tokenizer along
    before, after = (join(shard.objects(part.replace(**texts))) for part in (scored, credited))
    same = [name for name, value in vars(scored).items() if vars(credited)[name] is value]
    return before, after.replace(**{name: vars(before)[name] for name in same})


def weight_sketches(run: "Run") -> dict[str, dict[str, list[float]]]:
    """Of every learner's weights. Collective over the world."""
    found = {}
    for name, learner in run.learners.items():
        with run.residency.stage(f"sketch_{name}", [Tenant(name, WEIGHTS)]):
            found[name] = weight_sketch(learner.model, dist.group.WORLD)
    return found


def start_of(checkpoint: Path, run_folder: Path) -> str:
    """How a capsule names the checkpoint that its step begins at: relative to the run folder where it lies in it."""
    place, folder = checkpoint.absolute(), run_folder.absolute()
    return str(place.relative_to(folder)) if place.is_relative_to(folder) else str(place)
