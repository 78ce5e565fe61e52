"""Mean and standard deviation of a trained reward model's scores, which are exported with it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarlhf.algorithms.moments import RunningMoments
from megarlhf.data.batches import corpus_experience
from megarlhf.data.examples import Example
from megarlhf.engines.scorer import RewardModelScorer
from megarlhf.models.build import Model
from megarlhf.models.score_config import ScoreStatistics, label_names

_log = logging.getLogger(__name__)

EXAMPLES_AT_ONCE = 256
"""Of which one batch is made."""


@dataclass(frozen=True)
class ScoreMeasure:
    """Scores every answer of `examples`, better and worse alike, with the model as it is when it is asked."""

    model: Model
    examples: Sequence[Example]
    max_tokens: int
    """Tokens packed into one micro-batch."""

    def statistics(self) -> ScoreStatistics:
        """By label; the deviation is the unbiased one, 1 where all scores are equal. Collective over the world."""
        scorer, labels = RewardModelScorer(self.model, self.max_tokens), label_names(self.model.architecture)
        found = [RunningMoments() for _ in labels]
        for start in range(0, len(self.examples), EXAMPLES_AT_ONCE):
            raw = scorer.raw_scores(corpus_experience(self.examples[start : start + EXAMPLES_AT_ONCE], "last"))
            found = [moments.seen(column) for moments, column in zip(found, raw.T, strict=True)]
        return ScoreStatistics(tuple(one.mean for one in found), tuple(one.deviation for one in found))

    def entries(self) -> dict[str, Any]:
        """The statistics as config.json holds them; nothing when a score is not finite. Collective over the world."""
        found = self.statistics()
        if not torch.tensor([found.mean, found.std]).isfinite().all():
            _log.warning("the scores are not all finite (%s); the model is exported without their statistics", found)
            return {}
        return found.entries()
