"""How much goes through each model in a step, with every prompt and every response at its longest: an upper bound."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megarlhf.config.runs import AnyRun, DPORun, OnlineRun, RewardModelRun
from megarlhf.loop.planner.activations import Load
from megarlhf.loop.planner.models import PlannedModel
from megarlhf.parallel.grid import shards


@dataclass(frozen=True)
class Workload:
    """A step's sequences."""

    rows: int
    """Sequences of a step."""
    prompt: int
    """Tokens of a prompt; 0 where a run reads a data set."""
    response: int
    """Tokens that are predicted; all of a sequence where a run reads a data set."""
    num_prompts: int
    """Distinct prompts."""
    updates: int = 1
    """Optimizer updates of a step."""
    passes: int = 1
    """Times that a step's rows are trained on."""
    max_slots: int = 0
    """Sequences decoded at once per data-parallel rank; 0: nothing is sampled."""
    unit: int = 1
    """Rows that stay in one micro-batch."""
    samples: int = 1
    """Rows of a prompt, which is computed once for those in a micro-batch."""
    shards: int = 1
    """Parts of the step's rows that are held by ranks of their own."""

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt + self.response

    @property
    def tokens(self) -> int:
        """Of the rows that a rank holds."""
        return self.rows * self.length // self.shards

    def slots(self, dp: int) -> int:
        """Sequences in flight on one data-parallel rank."""
        return min(self.max_slots, math.ceil(self.rows / dp))

    def update_load(self, model: PlannedModel, dp: int) -> Load:
        """A micro-batch of an update, and how many there are on a data-parallel rank."""
        return self._load(model, math.ceil(self.rows * self.passes / self.updates / dp))

    def score_load(self, model: PlannedModel, dp: int) -> Load:
        """A micro-batch of a pass over the step's rows without gradients."""
        return self._load(model, math.ceil(self.rows / dp))

    def _load(self, model: PlannedModel, rows: int) -> Load:
        family = self._family(model, rows)
        unit = self.unit * (self.prompt + family * self.response)
        per_batch = max(1, model.micro_batch_tokens // unit) * self.unit * family
        # Shorter rows fill a micro-batch better, so that it can hold as many tokens as it may.
        tokens = max(unit, min(model.micro_batch_tokens, math.ceil(rows / (self.unit * family)) * unit))
        tokens = math.ceil(tokens / model.layout.tp) * model.layout.tp if model.layout.sp else tokens
        predicted = math.ceil(tokens * self.unit * family * self.response / unit)
        seen = self.prompt**2 / 2 + family * self.response * (self.prompt + self.response / 2)
        return Load(
            tokens,
            predicted,
            math.ceil(rows / per_batch),
            self.length,
            attended=seen * self.unit / unit,
            copied=math.ceil(predicted / self.response) * self.length if family > 1 else 0,
        )

    def _family(self, model: PlannedModel, rows: int) -> int:
        """Rows of a prompt that are in one micro-batch and share it (`engines.pipeline.shares_prompts`)."""
        if model.architecture.mixture is not None or model.dropout:
            return 1
        room = (model.micro_batch_tokens - self.prompt) // self.response
        return max(1, min(self.samples, rows, room))


def num_shards(settings: AnyRun, models: Mapping[str, PlannedModel], world_size: int) -> int:
    """Parts of a step's batch that ranks of their own hold."""
    most = settings.rollout.shards if isinstance(settings, OnlineRun) else 1
    return len(shards([model.layout for model in models.values()], world_size, most)) if most > 1 else 1


def workload_of(settings: AnyRun, num_shards: int = 1) -> Workload:
    """From the settings alone, but for the shards."""
    if isinstance(settings, OnlineRun):
        rollout, algorithm = settings.rollout, settings.algorithm
        return Workload(
            rows=rollout.batch_size * rollout.samples_per_prompt,
            prompt=settings.data.max_prompt_tokens,
            response=rollout.max_new_tokens,
            num_prompts=rollout.batch_size,
            samples=rollout.samples_per_prompt,
            updates=algorithm.num_epochs * algorithm.num_minibatches,
            passes=algorithm.num_epochs,
            max_slots=rollout.max_slots,
            shards=num_shards,
        )
    pair = 2 if isinstance(settings, DPORun | RewardModelRun) else 1
    rows = settings.data.batch_size * pair
    return Workload(rows, 0, settings.data.max_tokens, rows, unit=pair)
