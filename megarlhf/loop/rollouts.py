"""The source of a step's batch: prompts in order, weights brought up to date, responses sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from megarlhf.data.order import PromptOrder, occurrences
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.engines.generator import Completions, Generator, Request, Sampling
from megarlhf.engines.learner import Learner
from megarlhf.records.experience import Experience, flat_ids, scatter_flat
from megarlhf.records.metrics import Metric, Total
from megarlhf.records.prompts import Prompt, Sample, siblings
from megarlhf.records.texts import DecodedTexts
from megarlhf.residency.residency import Residency
from megarlhf.residency.schedule import GENERATOR_CACHE, GENERATOR_PACKED
from megarlhf.residency.stages import WEIGHTS, Tenant
from megarlhf.telemetry.spans import Spans
from megarlhf.weights.exchange import Resharder

_ACTOR, _GENERATOR = Tenant("actor", WEIGHTS), Tenant("generator", WEIGHTS)


@dataclass
class Rollouts:
    """Samples from the actor as it is now. Everything here is collective over the world."""

    prompts: Sequence[Prompt]
    order: PromptOrder
    samples_per_prompt: int
    sampling: Sampling
    tokenizer: Tokenizer
    generator: Generator
    actor: Learner
    resharder: Resharder | None
    """None: the generator's weights are the actor's."""
    residency: Residency
    spans: Spans
    report: Callable[[dict[str, Metric]], None]
    """Takes `bytes/resharded`, the bytes that crossed ranks when the weights were brought up to date."""
    is_checked: bool = False
    """Compare checksums after every reshard."""
    _version: int = -1

    @property
    def num_rows(self) -> int:
        """Prompts of the run."""
        return len(self.prompts)

    def next_batch(self, step: int) -> Experience:
        """The batch of `step`, see `draw`."""
        return self.draw(step)

    def draw(self, number: int) -> Experience:
        """Batch `number` of the prompts' order, or its shard that is held here: siblings are consecutive rows;
        `logp_rollout` is filled."""
        indices = self.order.batch(number)
        held = self.actor.model.groups.shard.part(len(indices))
        samples = siblings([self.prompts[indices[place]] for place in held], self.samples_per_prompt)
        # A prompt that is used twice in a batch needs other noise the second time, which the sample number gives.
        times = occurrences(indices)
        repeats = [times[place] for place in held for _ in range(self.samples_per_prompt)]
        numbered = [
            replace(sample, sample=sample.sample + repeat * self.samples_per_prompt)
            for sample, repeat in zip(samples, repeats, strict=True)
        ]
        return self.sample(numbered, number)

    def sample(self, samples: Sequence[Sample], step: int) -> Experience:
        """One row per sample, drawn with the noise of `step` from the actor's latest weights."""
        self.refresh()
        requests = [Request(sample.prompt.token_ids, sample.prompt.row_id, sample.sample) for sample in samples]
        weights = _ACTOR if self.resharder is None else _GENERATOR
        entered = self.residency.stage("generate", [weights, GENERATOR_PACKED, GENERATOR_CACHE])
        with self.spans("generate"), entered:
            completions = self.generator.sample(requests, replace(self.sampling, step=step))
            self.residency.note(GENERATOR_CACHE, self.generator.report.cache_bytes)
            self.residency.note(GENERATOR_PACKED, self.generator.report.packed_bytes)
        return experience_of(samples, completions, self.tokenizer)

    def refresh(self) -> None:
        """Reshard the actor's weights into the generation layout, if they changed since the last time or were freed.

        Sampling goes through here, so stale weights cannot be sampled from, whatever else is switched on or off.
        """
        if self.resharder is None:
            self.generator.model.weights_changed()  # they are the actor's, under the generator's linears
            return
        if self._version == self.actor.num_updates and self.residency.is_here(_GENERATOR):
            return
        with self.spans("reshard"), self.residency.stage("reshard", [_ACTOR, _GENERATOR]):
            report = self.resharder.run(is_checked=self.is_checked)
        self.report({"bytes/resharded": Total(report.bytes_moved)})
        self._version = self.actor.num_updates


def experience_of(samples: Sequence[Sample], completions: Completions, tokenizer: Tokenizer) -> Experience:
    """One row per sample and its completion, with `logp_rollout` and the texts, decoded where they are read."""
    prompts = [sample.prompt for sample in samples]
    rows = Experience.from_flat(
        flat_ids(prompt.token_ids for prompt in prompts),
        torch.tensor([len(prompt.token_ids) for prompt in prompts], dtype=torch.int64),
        completions.token_ids,
        completions.lengths,
        row_id=torch.tensor([prompt.row_id for prompt in prompts], dtype=torch.int64),
        group=torch.tensor([sample.group for sample in samples], dtype=torch.int64),
        finished=completions.finished,
    )
    everyone = torch.arange(rows.num_rows)
    return rows.replace(
        logp_rollout=scatter_flat(completions.logps, rows.mask),
        prompts=tuple(prompt.text for prompt in prompts),
        responses=DecodedTexts(tokenizer.decode, rows.tokens, rows.prompt_lengths, rows.lengths, everyone),
        metadata=tuple(prompt.metadata for prompt in prompts),
    )
