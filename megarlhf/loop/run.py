"""A run: the engines of one training job, its settings, and what it keeps between steps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from megarlhf.algorithms.catalogue import Algorithm
from megarlhf.algorithms.state import AlgorithmState
from megarlhf.config.settings import PPORun
from megarlhf.engines.learner import Learner, Update
from megarlhf.loop.rollouts import Rollouts
from megarlhf.records.experience import Experience
from megarlhf.records.metrics import Metric, merge_metrics, metric_results
from megarlhf.records.seeds import derive_seed
from megarlhf.telemetry.report import Reporter
from megarlhf.telemetry.spans import Spans
from megarlhf.weights.export import export_model


class Scorer(Protocol):
    """Anything that fills fields of the batch."""

    def annotate(self, experience: Experience) -> Experience:
        """The experience with further fields filled."""
        ...


@dataclass
class Run:
    """What the loop drives. `learners` are trained in their order; `scorers` run in theirs."""

    settings: PPORun
    algorithm: Algorithm
    source: Rollouts
    scorers: Mapping[str, Scorer]
    learners: Mapping[str, Learner]
    reporter: Reporter
    spans: Spans
    state: AlgorithmState
    folders: Mapping[str, str]
    """Model folder that each learner started from: exports copy its tokenizer and config."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers of the step so far."""
    episodes: int = 0
    """Responses trained on so far."""
    reported: list[dict[str, Metric]] = field(default_factory=list)
    """Metrics of the step's updates, and of scorers that share this list; merged and emptied by `finish`."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.settings.run.dir)

    def steps(self) -> range:
        """Steps to run."""
        return range(self.settings.run.steps)

    def credit(self, batch: Experience) -> tuple[Experience, dict[str, float]]:
        """Advantages and targets under the current state, which then moves for the next step."""
        batch, self.state, metrics = self.algorithm.credit(batch, self.settings.algorithm, self.state)
        entropy = batch.entropy[batch.mask]
        if len(entropy):
            metrics["objective/entropy"] = float(entropy.mean())
        return batch, metrics

    def minibatches(self, batch: Experience, step: int) -> Iterator[Experience]:
        """Every row once per epoch, in an order that depends on (seed, step, epoch) only."""
        algorithm, seed = self.settings.algorithm, self.settings.run.seed
        for epoch in range(algorithm.num_epochs):
            shuffler = torch.Generator().manual_seed(derive_seed(seed, "minibatches", step, epoch))
            order = torch.randperm(batch.num_rows, generator=shuffler)
            for rows in order.tensor_split(algorithm.num_minibatches):
                yield self.algorithm.prepare_minibatch(batch.select(rows), algorithm)

    def record(self, name: str, update: Update) -> bool:
        """Keeps an update's metrics; true when it went too far from the policy that sampled, so the step should end."""
        self.reported.append(update.metrics)
        self.metrics[f"gradient_norm/{name}"] = update.gradient_norm
        if not update.applied:
            self.metrics["updates/skipped"] = self.metrics.get("updates/skipped", 0) + 1
        kl = update.metrics["policy/approxkl_avg"].result() if "policy/approxkl_avg" in update.metrics else None
        target = self.settings.algorithm.target_kl
        too_far = target > 0 and kl is not None and kl > target
        if too_far:
            self.metrics["updates/stopped_by_target_kl"] = 1
        return too_far

    def finish(self, step: int, batch: Experience) -> None:
        """Saves when due, then reports the step. Collective over the world."""
        every = self.settings.run.save_every
        if every and (step + 1) % every == 0:
            with self.spans("save"):
                self.save(self.folder / "checkpoints" / f"step_{step + 1}")
        self.episodes += batch.num_rows
        numbers = metric_results(merge_metrics(self.reported)) | self.metrics | self.spans.take()
        numbers |= {f"lr/{name}": learner.learning_rate for name, learner in self.learners.items()}
        numbers |= {"episode": self.episodes, "bytes/resharded": self.source.bytes_resharded}
        self.reporter.step(step + 1, numbers)
        self.reporter.samples(step + 1, sample_rows(batch, self.settings.run.sample_texts))
        self.reported.clear()
        self.metrics = {}

    def save(self, folder: Path) -> None:
        """Weights of every learner as Hugging Face folders below `folder`. Collective over the world."""
        for name in self.learners:
            self._export(name, folder / name)

    def export(self) -> Path:
        """The actor as a Hugging Face folder, RUN_DIR/hf. Collective over the world."""
        self._export("actor", self.folder / "hf")
        return self.folder / "hf"

    def _export(self, name: str, folder: Path) -> None:
        model, source = self.learners[name].model, self.folders[name]
        export_model(model, folder, source_folder=source, replace=self.settings.run.overwrite)


def sample_rows(batch: Experience, count: int) -> list[dict]:
    """The first `count` rows as plain values, for samples.jsonl and the console."""
    return [
        {
            "row": int(batch.row_id[i]),
            "prompt": batch.prompts[i],
            "response": batch.responses[i],
            "score": float(batch.score[i]),
            "tokens": int(batch.mask[i].sum()),
            "finished": bool(batch.finished[i]),
        }
        for i in range(min(count, batch.num_rows))
    ]
