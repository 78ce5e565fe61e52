"""A run: the engines of one training job, its settings, and what it keeps between steps."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megarlhf import device
from megarlhf.algorithms.catalogue import Algorithm
from megarlhf.algorithms.moments import count_and_mean
from megarlhf.algorithms.state import AlgorithmState
from megarlhf.config.runs import AnyRun, OnlineRun, update_says_start
from megarlhf.engines.learner import Learner, Objective, Part, Update
from megarlhf.engines.pipeline import group_units
from megarlhf.loop.gap import watch_gap
from megarlhf.loop.objectives import objective
from megarlhf.loop.profiling import profiled
from megarlhf.loop.roles import Role
from megarlhf.loop.tape import Tape
from megarlhf.parallel.shards import EVERYBODY, RankedShard
from megarlhf.records.experience import Experience, valid_values
from megarlhf.records.metrics import Metric, merge_metrics, metric_results
from megarlhf.records.seeds import derive_seed
from megarlhf.residency.accounting import Record, metrics, over_ranks
from megarlhf.residency.average import Average
from megarlhf.residency.residency import Residency
from megarlhf.residency.stages import WEIGHTS, Tenant
from megarlhf.residency.stages import Part as ModelPart
from megarlhf.telemetry.report import Reporter
from megarlhf.telemetry.spans import Spans
from megarlhf.weights.adapters import export_peft
from megarlhf.weights.export import export_model


class Source(Protocol):
    """Where batches come from: sampled responses, or a data set."""

    @property
    def num_rows(self) -> int:
        """Prompts or examples that batches are made of."""
        ...

    def next_batch(self, step: int) -> Experience:
        """The batch of `step`, the same on every rank that holds its shard. May be collective over the world."""
        ...


class Scorer(Protocol):
    """Anything that fills fields of the batch."""

    def annotate(self, experience: Experience) -> Experience:
        """The experience with further fields filled."""
        ...


class Mixture(Protocol):
    """A second source whose loss is added to a learner's updates."""

    def part(self, update: int) -> Part:
        """What is mixed into the learner's update number `update`."""
        ...


@dataclass(frozen=True)
class Follower:
    """An average that moves with a learner's weights after every step."""

    average: Average
    learner: str
    export: str = ""
    """Folder in the run folder that the average is exported to at the end; empty: it is not."""


class Measure(Protocol):
    """What an exported model says of itself beyond its weights."""

    def entries(self) -> Mapping[str, Any]:
        """Entries for its config.json. Collective over the world."""
        ...


@dataclass(frozen=True)
class Passes:
    """How a batch is gone through: one pass in one piece for a data set."""

    num_epochs: int = 1
    num_minibatches: int = 1
    target_kl: float = 0.0


@dataclass
class Run:
    """What the loop drives. `learners` are trained in their order; `scorers` run in theirs."""

    settings: AnyRun
    algorithm: Algorithm
    source: Source
    scorers: Mapping[str, Scorer]
    learners: Mapping[str, Learner]
    num_steps: int
    passes: Passes
    temperature: float
    """Divides the logits of the policy in its loss."""
    reporter: Reporter
    spans: Spans
    state: AlgorithmState
    roles: Mapping[str, Role]
    """Of each learner: exports copy the tokenizer and config of the folder that it started from."""
    residency: Residency
    """Holds every model's parts, and moves them."""
    modules: Mapping[str, tuple[str, ...]]
    """By stage (a scorer's name, or learn_LEARNER) the models whose parts it works with."""
    mixtures: Mapping[str, Mixture] = field(default_factory=dict)
    """By learner."""
    first_steps: Mapping[str, int] = field(default_factory=dict)
    """By learner, the step in which it begins to learn; 0 for those that are not named."""
    followers: Sequence[Follower] = ()
    judge: Scorer | None = None
    """What scores sampled responses; None: nothing is sampled."""
    measure: Measure | None = None
    """What is found out about the model when it is exported."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers of the step so far."""
    episodes: int = 0
    """Sequences trained on so far."""
    reported: list[dict[str, Metric]] = field(default_factory=list)
    """Metrics of the step's updates, and of stages that share this list; merged and emptied by `finish`."""
    memory: Sequence[Record] = ()
    """What the last step took, added up over ranks."""
    shard: RankedShard = EVERYBODY
    """Of the step's batch, which is held here; the whole batch, where it is kept in one piece."""
    tape: Tape | None = None
    """Takes down the step, when a capsule of it is to be kept."""
    _objectives: dict[str, Objective] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.settings.run.dir)

    def resident(self, stage: str, *parts: ModelPart) -> AbstractContextManager[None]:
        """Inside the block those parts of the stage's models are on the device; the rest has gone where it waits."""
        models = self.modules.get(stage, ())
        return self.residency.stage(stage, [Tenant(model, part) for model in models for part in parts])

    def profiled(self, step: int) -> AbstractContextManager[None]:
        """Writes a profile of the block where `step` is one of `run.profile`."""
        return profiled(self.folder / "profile", step + 1, self.settings.run.profile, dist.get_rank())

    def next_batch(self, step: int) -> Experience:
        """The batch of `step` as scorers read it."""
        return self.algorithm.before_scoring(self.source.next_batch(step), self.settings.algorithm)

    def credit(self, batch: Experience) -> Experience:
        """Advantages and targets under the current state, which then moves for the next step; the step's losses keep
        the coefficients from before."""
        now = self.algorithm.settings_now(self.settings.algorithm, self.state)
        is_start = isinstance(self.settings, OnlineRun) and update_says_start(self.settings)
        self._objectives = {
            name: objective(self.algorithm, now, learner.model.head, self.temperature, is_start=is_start)
            for name, learner in self.learners.items()
        }
        scored, state = batch, self.state
        if self.algorithm.credit is not None:
            batch, self.state, numbers = self.algorithm.credit(batch, self.settings.algorithm, self.state, self.shard)
            self.metrics |= numbers
            if isinstance(self.settings, OnlineRun):
                watch_gap(self.settings.rollout, numbers, warns=dist.get_rank() == 0)
        if self.tape is not None:
            self.tape.state, self.tape.scored, self.tape.credited = state.numbers(), scored, batch
        if batch.entropy is not None:
            count, mean = count_and_mean(valid_values(batch.entropy, batch.mask), self.shard)
            self.metrics |= {"objective/entropy": mean} if count else {}
        return batch

    def learning(self, step: int) -> Mapping[str, Learner]:
        """The learners that are trained in `step`, in their order."""
        return {name: one for name, one in self.learners.items() if step >= self.first_steps.get(name, 0)}

    def minibatches(self, batch: Experience, step: int) -> Iterator[Experience]:
        """Every row once per epoch, in an order that depends on (seed, step, epoch) and the part of the batch only;
        siblings that a loss compares stay together. A minibatch takes as much from every part that is held here."""
        # what no loss reads is not carried along
        batch = batch.replace(token_reward=None, entropy=None, prompts=(), responses=(), metadata=())
        units = group_units(batch) if self.algorithm.keeps_groups else [[row] for row in range(batch.num_rows)]
        num_parts = self.settings.rollout.shards if isinstance(self.settings, OnlineRun) else 1
        parts = self.shard.part(num_parts)
        for epoch in range(self.passes.num_epochs):
            orders = [self._order(len(units) // len(parts), step, epoch, part) for part in parts]
            for pieces in zip(*(order.tensor_split(self.passes.num_minibatches) for order in orders), strict=True):
                starts = (place * len(units) // len(parts) for place in range(len(parts)))
                chosen = torch.cat([piece + start for piece, start in zip(pieces, starts, strict=True)])
                rows = [row for unit in chosen.tolist() for row in units[unit]]
                yield self.algorithm.prepare_minibatch(batch.select(rows), self.settings.algorithm, self.shard)

    def _order(self, num_units: int, step: int, epoch: int, part: int) -> torch.Tensor:
        """[num_units] int64: a permutation."""
        which = [part] if part else []  # the first is numbered like a batch in one piece
        seed = derive_seed(self.settings.run.seed, "minibatches", step, epoch, *which)
        return torch.randperm(num_units, generator=torch.Generator().manual_seed(seed))

    def parts(self, name: str, minibatch: Experience) -> Sequence[Part]:
        """What one learner is updated on next: the minibatch, and what is mixed in."""
        mixed_in = [self.mixtures[name].part(self.learners[name].num_updates)] if name in self.mixtures else []
        return [Part(minibatch, self._objectives[name]), *mixed_in]

    def record(self, name: str, update: Update) -> bool:
        """Keeps an update's metrics; true when it went too far from the policy that sampled, so the step should end."""
        self.reported.append(update.metrics)
        if self.tape is not None:
            self.tape.learn(name, update)
        self.metrics[f"gradient_norm/{name}"] = update.gradient_norm
        if not update.applied:
            self.metrics["updates/skipped"] = self.metrics.get("updates/skipped", 0) + 1
        kl = update.metrics["policy/approxkl_avg"].result() if "policy/approxkl_avg" in update.metrics else None
        too_far = self.passes.target_kl > 0 and kl is not None and kl > self.passes.target_kl
        if too_far:
            self.metrics["updates/stopped_by_target_kl"] = 1
        return too_far

    def finish(self, step: int, batch: Experience) -> dict[str, float]:
        """Exports when due, then reports the step; returns its numbers. Collective over the world."""
        for follower in self.followers:
            with self._weights_of(follower.learner, "follow"):
                follower.average.update(self.learners[follower.learner].model.named_parameters())
        every = self.settings.run.save_every
        if every and (step + 1) % every == 0:
            with self.spans("save"):
                self.save(self.folder / "exports" / f"step_{step + 1}")
        self.episodes += int(self.shard.sum(torch.tensor(batch.num_rows)))
        numbers = metric_results(merge_metrics(self.reported)) | self.metrics | self.spans.take()
        numbers |= {f"lr/{name}": learner.learning_rate for name, learner in self.learners.items()}
        numbers["episode"] = self.episodes
        self.memory = over_ranks(self.residency.take(), dist.group.WORLD, device.current())
        numbers |= metrics(self.memory)
        self.state = self.algorithm.after_step(self.state, self.settings.algorithm, numbers)
        self.reporter.step(step + 1, numbers)
        self.reporter.memory(step + 1, [record.row() for record in self.memory])
        count = self.settings.run.sample_texts
        samples = [row for part in self.shard.objects(sample_rows(batch, count)) for row in part]
        self.reporter.samples(step + 1, samples[:count])
        self.reported.clear()
        self.metrics = {}
        return numbers

    def save(self, folder: Path) -> None:
        """Weights of every learner as Hugging Face folders below `folder`. Collective over the world."""
        for name in self.learners:
            self._export(name, folder / name)

    def export(self) -> Path:
        """The model that the command is about as a Hugging Face folder, RUN_DIR/hf. Collective over the world."""
        self._export(list(self.learners)[-1], self.folder / "hf")
        for follower in self.followers:
            if follower.export:
                self._export(follower.learner, self.folder / follower.export, follower.average)
        return self.folder / "hf"

    def _export(self, name: str, folder: Path, other: Average | None = None) -> None:
        """The whole model, adapters merged in, and beside it the adapters in PEFT's format where there are any; with
        the `other` weights in it where given."""
        model, role = self.learners[name].model, self.roles[name]
        with self._weights_of(name, f"save_{name}"):
            with other.swapped_in(model.named_parameters()) if other else nullcontext():
                entries = self.measure.entries() if self.measure else {}
                # What is there is this run's: a resumed one comes by here again.
                export_model(model, folder, source_folder=role.folder, replace=True, entries=entries)
                if role.lora.rank:
                    lora_folder = folder.with_name(f"{folder.name}_lora")
                    export_peft(model, lora_folder, role.lora, base=role.folder, replace=True)

    def _weights_of(self, learner: str, stage: str) -> AbstractContextManager[None]:
        return self.residency.stage(stage, [Tenant(learner, WEIGHTS)])


def sample_rows(batch: Experience, count: int) -> list[dict]:
    """The first `count` rows as plain values, for samples.jsonl and the console; what a row does not have is absent."""
    return [_sample(batch, row) for row in range(min(count, batch.num_rows))]


def _sample(batch: Experience, row: int) -> dict:
    optional = {"score": batch.score, "preference": batch.preference}
    numbers = {name: float(values[row]) for name, values in optional.items() if values is not None}
    return {
        "row": int(batch.row_id[row]),
        "prompt": batch.prompts[row],
        "response": batch.responses[row],
        **numbers,
        "tokens": int(batch.mask[row].sum()),
        "finished": bool(batch.finished[row]),
    }
