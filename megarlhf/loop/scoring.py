"""The score of each response: a reward model, reward functions, or the weighted sum of both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarlhf.engines.scorer import RewardModelScorer
from megarlhf.errors import RewardError
from megarlhf.records.experience import Experience
from megarlhf.rewards.functions import call_reward

RewardFunction = Callable[..., Sequence[float]]


@dataclass(frozen=True)
class Scores:
    """Fills `score`: weights[0] * the reward model (when there is one) + the functions with the further weights."""

    reward_model: RewardModelScorer | None
    functions: Sequence[RewardFunction]
    weights: Sequence[float]
    timeout_s: float

    def annotate(self, experience: Experience) -> Experience:
        """Collective over the world."""
        parts = [] if self.reward_model is None else [self.reward_model.scores(experience)]
        parts += [score_on_all_ranks(function, experience, self.timeout_s) for function in self.functions]
        total = sum(weight * part for weight, part in zip(self.weights, parts, strict=True))
        return experience.replace(score=torch.as_tensor(total, dtype=torch.float32))


def score_on_all_ranks(function: RewardFunction, experience: Experience, timeout_s: float) -> torch.Tensor:
    """[B] float32 on every rank. Collective over the world: each rank calls `function` on its own run of rows.

    A failure on any rank raises RewardError on all of them, so that none waits for the others.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    size = -(-experience.num_rows // world_size)
    rows = range(rank * size, min(experience.num_rows, (rank + 1) * size))
    scores: list[float] = []
    failure = ""
    if rows:
        part = experience.select(list(rows))
        try:
            scores = call_reward(function, part.prompts, part.responses, part.metadata, timeout_s).tolist()
        except RewardError as problem:
            failure = f"rank {rank}: {problem}"
    gathered: list = [None] * world_size
    dist.all_gather_object(gathered, (scores, failure))
    failures = [text for _, text in gathered if text]
    if failures:
        raise RewardError("\n".join(failures))
    return torch.tensor([score for part, _ in gathered for score in part], dtype=torch.float32)
