"""Keeps a run's checkpoints: what belongs to its state, when it is saved, and how it is put back."""

import logging
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarlhf.checkpoints.capsule import prune_capsules, write_capsule
from megarlhf.checkpoints.discovery import (
    found_steps,
    remove_checkpoint,
    remove_left_overs,
    step_folder,
    steps_to_keep,
    whole_checkpoints,
)  # fmt: skip
from megarlhf.checkpoints.load import Checkpoint
from megarlhf.checkpoints.save import Content, PendingSave
from megarlhf.config.load import to_dict
from megarlhf.device.versions import versions
from megarlhf.engines.state import (
    Holdings,
    average_boxes,
    average_shapes,
    learner_boxes,
    learner_numbers,
    learner_shapes,
    restore_average,
    restore_learner,
    trained_holdings,
)  # fmt: skip
from megarlhf.errors import CheckpointError, Requeue
from megarlhf.loop.dynamic import DynamicRollouts
from megarlhf.loop.resuming import model_fingerprints
from megarlhf.loop.run import Run
from megarlhf.loop.stopping import Stopping
from megarlhf.loop.tape import begin_tape, capsule_of, start_of
from megarlhf.parallel.rows import gather_objects
from megarlhf.residency.stages import OPTIMIZER, WEIGHTS, Tenant
from megarlhf.weights.gather import on_writer

_log = logging.getLogger(__name__)


class Keeper:
    """The checkpoints of one run. All methods are collective over the world."""

    def __init__(self, run: Run, stopping: Stopping):
        self._run, self._stopping = run, stopping
        self._settings = run.settings.run
        self._group = dist.group.WORLD
        self._pending: PendingSave | None = None
        self.before: list[dict[str, Any]] = []
        """Texts sampled before the first step, for the end."""

    @cached_property
    def _learners(self) -> dict[str, Holdings]:
        run = self._run
        return {name: trained_holdings(learner.model, run.roles[name].lora) for name, learner in run.learners.items()}

    @cached_property
    def _averages(self) -> dict[str, Holdings]:
        """By the name that an average's tensors begin with, in the order of the run's followers."""
        run = self._run
        return {
            f"average{number}": trained_holdings(run.learners[follower.learner].model, run.roles[follower.learner].lora)
            for number, follower in enumerate(run.followers)
        }

    @cached_property
    def _models(self) -> dict[str, str]:
        return model_fingerprints(self._run.settings)

    def restore(self, checkpoint: Checkpoint) -> int:
        """Puts the run where it was when the checkpoint was made; returns the number of steps done."""
        run, state = self._run, checkpoint.state
        checkpoint.require_shapes(self._shapes())
        try:
            self._require_same_rows(state["num_rows"])
            for name, holdings in self._learners.items():
                with self._resident(name):
                    restore_learner(name, run.learners[name], holdings, checkpoint, state["learners"][name])
            for follower, (name, holdings) in zip(run.followers, self._averages.items(), strict=True):
                restore_average(name, follower.average, holdings, checkpoint)
            run.state = run.state.restored(state["algorithm"])
            run.episodes = state["episodes"]
            self.before = state["before"]
            if isinstance(run.source, DynamicRollouts):
                run.source.num_drawn = state["num_drawn"]
        except KeyError as problem:
            raise CheckpointError(f"{checkpoint.folder}: its state lacks {problem}") from problem
        return checkpoint.step

    def _require_same_rows(self, num_rows: int) -> None:
        found = self._run.source.num_rows
        if num_rows != found:
            raise CheckpointError(
                f"data: the file has {found} usable rows, the checkpoint's run had {num_rows}; which rows come next "
                "would change: give the same file"
            )

    def after_step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Saves when it is due after `step` steps, or when the run is asked to stop: then raises Requeue."""
        self._keep_capsule(step)
        every, is_last = self._settings.checkpoint_every, step == self._run.num_steps
        reason = self._stopping.reason(self._group)
        if self._pending is not None and (reason or is_last or self._all_written()):
            self._finish()
        if reason or (every and (step % every == 0 or is_last)):
            self._save(step, numbers, is_background=self._settings.checkpoint_in_background and not (reason or is_last))
            if not (reason or is_last):
                self.expect_capsule(step_folder(Path(self._settings.dir), step))
        if reason and not is_last:
            raise Requeue(f"requeue: stopped by {reason} after saving step {step}; the same command goes on from there")

    def expect_capsule(self, start: Path | None) -> None:
        """Has the next step taken down, when capsules are kept. `start`: the checkpoint that it begins at."""
        if self._settings.keep_capsules:
            name = start_of(start, Path(self._settings.dir)) if start else ""
            self._run.tape = begin_tape(self._run, name)

    def _keep_capsule(self, step: int) -> None:
        run = self._run
        if run.tape is None:
            return
        with run.spans("capsule"):
            capsule, run.tape = capsule_of(run, run.tape, step), None
            on_writer(lambda: write_capsule(run.folder, capsule), self._group)
            on_writer(lambda: self._prune_capsules(step - 1), self._group)

    def _prune_capsules(self, *being_written: int) -> None:
        checkpoints = [*found_steps(self._run.folder), *being_written]
        prune_capsules(self._run.folder, self._settings.keep_capsules, checkpoints)

    def _save(self, step: int, numbers: Mapping[str, float], *, is_background: bool) -> None:
        start = time.monotonic()
        self._finish()
        with self._run.spans("checkpoint"):
            best = self._settings.keep_best.removeprefix("-")
            content = Content(list(self._boxes()), self._shapes(), self._state(step))
            folder = step_folder(Path(self._settings.dir), step)
            on_writer(lambda: remove_left_overs(Path(self._settings.dir)), self._group)
            self._pending = PendingSave(
                folder, content, step, self._group, metric=self._settings.keep_best, value=numbers.get(best)
            )
            if not is_background:
                self._finish()
        self._stopping.saved(time.monotonic() - start)

    def _all_written(self) -> bool:
        return all(gather_objects(self._pending is not None and self._pending.is_written, self._group))

    def _finish(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.finish()
        on_writer(self._prune, self._group)

    def _prune(self) -> None:
        folder = Path(self._settings.dir)
        manifests, problems = whole_checkpoints(folder)
        for problem in problems:
            _log.warning("checkpoints: %s; it is left where it is, and not used", problem)
        kept = steps_to_keep(manifests, self._settings.keep_checkpoints, self._settings.keep_best)
        for manifest in manifests:
            if manifest.step not in kept:
                remove_checkpoint(step_folder(folder, manifest.step))
        if self._settings.keep_capsules:
            self._prune_capsules()

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for name, holdings in self._learners.items():
            found |= learner_shapes(name, holdings)
        for name, holdings in self._averages.items():
            found |= average_shapes(name, holdings)
        return found

    def _boxes(self):
        run = self._run
        for name, holdings in self._learners.items():
            with self._resident(name):
                yield from learner_boxes(name, run.learners[name], holdings)
        for follower, (name, holdings) in zip(run.followers, self._averages.items(), strict=True):
            yield from average_boxes(name, follower.average, holdings)

    def _resident(self, learner: str):
        """Weights and optimizer are on the device inside the block."""
        tenants = [Tenant(learner, WEIGHTS), Tenant(learner, OPTIMIZER)]
        return self._run.residency.stage(f"checkpoint_{learner}", tenants)

    def _state(self, step: int) -> dict[str, Any]:
        run = self._run
        return {
            "step": step,
            "num_steps": run.num_steps,
            "episodes": run.episodes,
            "num_rows": run.source.num_rows,
            "num_drawn": run.source.num_drawn if isinstance(run.source, DynamicRollouts) else step,
            "learners": {name: learner_numbers(learner) for name, learner in run.learners.items()},
            "algorithm": run.state.numbers(),
            "before": self.before,
            "models": self._models,
            "settings": to_dict(run.settings),
            "versions": versions(),
        }
