"""The score of each response: a reward model, functions and servers, mixed with weights and logged one by one."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from megarlhf.algorithms.moments import count_and_mean
from megarlhf.config.settings import Reward
from megarlhf.errors import RewardError
from megarlhf.loop.remote import ask_on_all_ranks
from megarlhf.models.score_config import ScoreRule
from megarlhf.parallel.shards import EVERYBODY, RankedShard
from megarlhf.records.experience import Experience
from megarlhf.records.metrics import Mean, Metric, Total
from megarlhf.records.shards import Shard
from megarlhf.rewards.sources import Source, sources

Report = Callable[[dict[str, Metric]], None]

_log = logging.getLogger(__name__)

ISOLATION_LIMITS = 4
"""Finding the failing rows of a call may take as many times reward.timeout_s; then the rest count as failing too."""


class RewardModel(Protocol):
    """A reward model, wherever it lives."""

    @property
    def rule(self) -> ScoreRule:
        """How the labels' scores become one."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the K labels."""
        ...

    def raw_scores(self, experience: Experience) -> torch.Tensor:
        """[B, K] float32, as the head gives them. Collective over the world."""
        ...


@dataclass(frozen=True)
class Scores:
    """Fills `score`: the reward model's (when there is one) and the sources' scores, times `weights` in that order.

    `report` gets the metrics that `_metrics` documents. With on_failure "stop" the first failure raises RewardError on
    every rank. With "mask" the responses without a score are no part of the training: their mask is emptied, and they
    take the mean score of the others, so that the mean over the batch is that of the scored.
    """

    reward_model: RewardModel | None
    sources: Sequence[Source]
    weights: Sequence[float]
    timeout_s: float
    on_failure: Literal["stop", "mask"]
    report: Report
    shard: RankedShard = EVERYBODY
    """Of the step's batch, whose rows are given."""

    def annotate(self, experience: Experience) -> Experience:
        """Collective over the world."""
        isolate_s = ISOLATION_LIMITS * self.timeout_s if self.on_failure == "mask" else 0.0
        raw = None if self.reward_model is None else self.reward_model.raw_scores(experience)
        parts = {} if raw is None else {"model": self.reward_model.rule.combined(raw)}
        for source in self.sources:
            parts[source.name] = score_on_all_ranks(source, experience, isolate_s, self.shard)
        stacked = torch.stack(list(parts.values()))
        has_score = stacked.isfinite().all(dim=0)
        self._require(has_score, experience)
        self.report(_metrics(parts, has_score, self.shard) | self._raw_metrics(raw))
        weights = torch.tensor(list(self.weights), dtype=torch.float32)
        score = (weights[:, None] * stacked).sum(0)
        score = torch.where(has_score, score, count_and_mean(score[has_score], self.shard)[1])
        if bool(has_score.all()):
            return experience.replace(score=score)
        return experience.replace(score=score, mask=experience.mask & has_score[:, None])

    def _raw_metrics(self, raw: torch.Tensor | None) -> dict[str, Metric]:
        """Of a reward model whose scores are normalised or combined, what it said before that, [B, K].

        reward/model_raw    mean score of the label, where there is one
        reward/model/LABEL  of several labels, the mean score of each
        """
        if raw is None or self.reward_model.rule == ScoreRule():
            return {}
        labels = self.reward_model.labels
        names = ["reward/model_raw"] if len(labels) == 1 else [f"reward/model/{label}" for label in labels]
        return {name: _mean(column, self.shard) for name, column in zip(names, raw.T, strict=True)}

    def _require(self, has_score: torch.Tensor, experience: Experience) -> None:
        """Raises RewardError where too few rows have a score, [B] bool, for what `on_failure` says."""
        num_rows, num_scored = self.shard.sum(torch.tensor([experience.num_rows, int(has_score.sum())])).tolist()
        if num_scored == num_rows or (self.on_failure == "mask" and num_scored):
            return
        found = self.shard.objects(experience.row_id[~has_score].tolist())
        rows = [row for part in found for row in part]
        raise RewardError(
            f"reward: {len(rows)} of {int(num_rows)} responses of this step have no finite score (rows "
            f"{rows[:8]} of the data set; reward.on_failure {self.on_failure}); look at the reward model, or at the "
            "warnings above"
        )


def reward_scores(
    settings: Reward,
    reward_model: RewardModel | None,
    tokenizer: str,
    report: Report,
    shard: RankedShard = EVERYBODY,
) -> Scores:
    """The scorer that `settings` describe. `tokenizer` is the fingerprint of the one that samples.

    `report` takes each batch's metrics. Raises ConfigError.
    """
    found = sources(settings, tokenizer)
    weights = settings.weights or (1.0,) * (len(found) + (reward_model is not None))
    return Scores(reward_model, found, weights, settings.timeout_s, settings.on_failure, report, shard)


def _metrics(parts: dict[str, torch.Tensor], has_score: torch.Tensor, shard: Shard) -> dict[str, Metric]:
    """Of one batch, all shards of it, before weights.

    reward/NAME    mean score by each source (model: the reward model's, normalised), over the rows that it scored
    reward/failed  rows that some source did not score, where there were any
    """
    found: dict[str, Metric] = {f"reward/{name}": _mean(scores, shard) for name, scores in parts.items()}
    num_failed = int(shard.sum((~has_score).sum()))
    return found | {"reward/failed": Total(num_failed)} if num_failed else found


def _mean(scores: torch.Tensor, shard: Shard) -> Mean:
    """Of those [B] that are numbers, over all shards."""
    scored = scores[scores.isfinite()].double()
    total, count = shard.sum(torch.stack([scored.sum(), torch.tensor(float(len(scored)))])).tolist()
    return Mean(total, count)


def score_on_all_ranks(source: Source, experience: Experience, isolate_s: float, shard: RankedShard) -> torch.Tensor:
    """[B] float32 on every rank. Collective over the world: each rank asks `source` about its own run of rows.

    A failure on any rank raises RewardError on all of them, so that none waits for the others. With `isolate_s` > 0
    the failing rows are NaN instead.
    """

    def ask(part: Experience) -> tuple[torch.Tensor, str]:
        try:
            return source.scores(part), ""
        except RewardError as problem:
            scores = _isolate(source, part, isolate_s) if isolate_s else torch.zeros(0)
            return scores, f"rank {dist.get_rank()}: {problem}"

    result, problems = ask_on_all_ranks(ask, experience, shard)
    failures = "\n".join(problems)
    if not failures:
        return result
    if not isolate_s:
        raise RewardError(failures)
    lost = int(shard.sum(result.isnan().sum()))
    if dist.get_rank() == 0:
        _log.warning("reward %s: %d responses have no score: %s", source.name, lost, failures)
    return result


def _isolate(source: Source, rows: Experience, limit_s: float) -> torch.Tensor:
    """[B] float32 with NaN where the source fails for the row alone, or was not asked because time was up."""
    scores = torch.full((rows.num_rows,), torch.nan)
    deadline = time.monotonic() + limit_s
    for row in range(rows.num_rows):
        if time.monotonic() > deadline:
            break
        try:
            scores[row] = source.scores(rows.select([row]))[0]
        except RewardError:
            continue
    return scores
