"""Forward-only passes that fill fields of an Experience: log-probs, values, or a reward model's scores.

Each data-parallel rank scores its share of the rows; results travel to every rank that holds them and land in input
order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from megarlhf import device
from megarlhf.engines.pipeline import MicroBatch, micro_batches, run_pass
from megarlhf.models.build import Model
from megarlhf.models.forward import values, vocabulary_logprobs
from megarlhf.models.lora import Key, adapters_off
from megarlhf.models.score_config import ScoreRule, label_names
from megarlhf.parallel.groups import Groups
from megarlhf.parallel.rows import gather_rows
from megarlhf.records.experience import Experience, scatter_flat, valid_counts
from megarlhf.records.spans import Reads

ScoreHead = Callable[[torch.Tensor, MicroBatch], torch.Tensor]


@torch.no_grad()
def score_rows(
    model: Model,
    experience: Experience,
    counts: Sequence[int],
    max_tokens: int,
    head: ScoreHead,
    *,
    reads: Reads = "before",
) -> torch.Tensor:
    """[n] float32: the values of all rows end to end, on every rank's host, in input order. Collective over the world.

    `head(hidden, micro_batch)` returns the values of its rows, flat and in row order; `counts[row]` says how many.
    `reads` says which hidden states the head needs: those before valid tokens, or those of whole rows.
    """
    groups = model.groups
    modes = [chunk.training for chunk in model.chunks]
    for chunk in model.chunks:
        chunk.eval()
    batches = micro_batches(experience, model, max_tokens, reads=reads)
    outputs = run_pass(model, model.chunks, batches, head, train=False)
    for chunk, mode in zip(model.chunks, modes, strict=True):
        chunk.train(mode)
    flat = torch.empty(sum(counts), device=device.current())
    if groups.is_last_stage and groups.coordinates.tp == groups.coordinates.cp == 0:
        rows = [row for batch in batches for row in batch.rows]
        parts = [values.float() for batch, values in zip(batches, outputs, strict=True) if batch.rows]
        mine = torch.cat([flat[:0], *parts])
        flat.copy_(gather_rows(rows, [counts[row] for row in rows], mine, experience.num_rows, groups.rows)[0])
    return _from_one_rank(flat, groups).cpu()


@device.labelled("communicate")
def _from_one_rank(values: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The values of a model's rank that is first in cp and tp and last in pp, written over the others'. Collective over
    these groups: all ranks hold the same to the last bit, whatever their own copies would have come to."""
    place, layout = groups.coordinates, groups.layout
    if layout.cp > 1 and groups.is_last_stage and place.tp == 0:
        dist.broadcast(values, group_src=0, group=groups.cp)
    if layout.tp > 1 and groups.is_last_stage:
        dist.broadcast(values, group_src=0, group=groups.tp)
    if layout.pp > 1:
        dist.broadcast(values, group_src=layout.pp - 1, group=groups.pp)
    return values


@dataclass(frozen=True)
class LogprobScorer:
    """Log-probs of the sampled tokens under `model`, in its own layout, written to `field`."""

    model: Model
    field: Literal["logp_start", "logp_reference"]
    temperature: float
    max_tokens: int

    def annotate(self, experience: Experience) -> Experience:
        """Fills the field [B, T]; with `logp_start` also `entropy` [B, T]. Collective over the world."""
        with_entropy = self.field == "logp_start"

        def head(hidden: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
            packed = batch.packed
            logp, entropy = vocabulary_logprobs(
                self.model, hidden, packed.logit_positions, packed.targets, self.temperature, with_entropy=with_entropy
            )
            return torch.stack([logp, entropy], 1).flatten() if with_entropy else logp

        width = 2 if with_entropy else 1
        counts = (width * valid_counts(experience.mask)).tolist()
        flat = score_rows(self.model, experience, counts, self.max_tokens, head)
        if not with_entropy:
            return experience.replace(**{self.field: scatter_flat(flat, experience.mask)})
        logp, entropy = (scatter_flat(column, experience.mask) for column in flat.view(-1, 2).T)
        return experience.replace(logp_start=logp, entropy=entropy)


class OtherWeights(Protocol):
    """A second set of weights for a model: a `Snapshot`, or an `Average`."""

    def swapped_in(self, parameters: Mapping[Key, torch.nn.Parameter]) -> AbstractContextManager[None]:
        """Inside the block `parameters` hold the other weights."""
        ...


@contextmanager
def holding(model: Model, weights: OtherWeights) -> Iterator[None]:
    """Inside the block `model` holds the other weights, afterwards its own again; its linears are told both times."""
    with weights.swapped_in(model.named_parameters()):
        model.weights_changed()
        yield
    model.weights_changed()


@dataclass(frozen=True)
class AdapterFreeScorer:
    """Log-probs under the reference of a model with adapters: the same model with them switched off."""

    scorer: LogprobScorer

    def annotate(self, experience: Experience) -> Experience:
        """Fills `logp_reference` [B, T]. Collective over the world."""
        with adapters_off(self.scorer.model):
            return self.scorer.annotate(experience)


@dataclass(frozen=True)
class ReferenceScorer:
    """Log-probs under the reference: `scorer`'s model with the other weights in it."""

    weights: OtherWeights
    scorer: LogprobScorer

    def annotate(self, experience: Experience) -> Experience:
        """Fills `logp_reference` [B, T]. Collective over the world."""
        with holding(self.scorer.model, self.weights):
            return self.scorer.annotate(experience)


@dataclass(frozen=True)
class ValueScorer:
    """The critic's value before each sampled token."""

    model: Model
    max_tokens: int

    def annotate(self, experience: Experience) -> Experience:
        """Fills `value` [B, T]. Collective over the world."""

        def head(hidden: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
            return values(self.model, hidden, batch.packed.logit_positions)

        counts = valid_counts(experience.mask).tolist()
        flat = score_rows(self.model, experience, counts, self.max_tokens, head)
        return experience.replace(value=scatter_flat(flat, experience.mask))


@dataclass(frozen=True)
class RewardModelScorer:
    """A reward model's score of each whole sequence, read at its last token (by length, whatever the pad id is)."""

    model: Model
    max_tokens: int
    rule: ScoreRule = ScoreRule()
    """How the labels' scores become one."""

    def raw_scores(self, experience: Experience) -> torch.Tensor:
        """[B, K] float32, as the head gives them. Collective over the world."""

        def head(hidden: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
            return values(self.model, hidden, batch.packed.last_positions).flatten()

        num_rows, num_labels = experience.num_rows, len(self.labels)
        counts = [num_labels] * num_rows
        flat = score_rows(self.model, experience, counts, self.max_tokens, head, reads="rows")
        return flat.view(num_rows, num_labels)

    def scores(self, experience: Experience) -> torch.Tensor:
        """[B] float32, by the rule. Collective over the world."""
        return self.rule.combined(self.raw_scores(experience))

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the K labels."""
        return label_names(self.model.architecture)


@dataclass(frozen=True)
class ExchangedRewardModelScorer:
    """A reward model that lives in the critic's module: `scorer`'s model with the other weights in it."""

    weights: OtherWeights
    scorer: RewardModelScorer

    def raw_scores(self, experience: Experience) -> torch.Tensor:
        """[B, K] float32, as the head gives them. Collective over the world."""
        with holding(self.scorer.model, self.weights):
            return self.scorer.raw_scores(experience)

    def scores(self, experience: Experience) -> torch.Tensor:
        """[B] float32, by the rule. Collective over the world."""
        return self.rule.combined(self.raw_scores(experience))

    @property
    def rule(self) -> ScoreRule:
        """How the labels' scores become one."""
        return self.scorer.rule

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the K labels."""
        return self.scorer.labels
