"""Dynamic sampling (DAPO, Yu et al., 2025, section 3.2): prompts whose responses all score alike teach nothing.

Groups with one score have advantage 0 everywhere. They are put aside and further prompts are drawn, until the batch is
full of groups that carry signal or the rounds are used up; then the batch is filled with groups that were put aside.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from megarlhf.engines.pipeline import group_units
from megarlhf.loop.rollouts import Rollouts
from megarlhf.records.experience import Experience
from megarlhf.records.joining import join
from megarlhf.records.metrics import Metric, Total
from megarlhf.records.prompts import Prompt, Sample


class Scores(Protocol):
    """What fills `score`."""

    def annotate(self, experience: Experience) -> Experience:
        """The experience with its scores."""
        ...


@dataclass
class DynamicRollouts:
    """Rollouts that are scored while they are drawn. Collective over the world."""

    rollouts: Rollouts
    scores: Scores
    scoring: Callable[[], AbstractContextManager[None]]
    """The stage that scores are given in."""
    extra_rounds: int
    report: Callable[[dict[str, Metric]], None]
    """Takes `rollout/rounds` and `rollout/groups_without_signal`."""
    num_drawn: int = 0
    """Batches of prompts drawn so far: more than steps, so it belongs to the state of a run."""

    @property
    def prompts(self) -> Sequence[Prompt]:
        """All prompts of the run."""
        return self.rollouts.prompts

    @property
    def num_rows(self) -> int:
        """Prompts of the run."""
        return self.rollouts.num_rows

    def sample(self, samples: Sequence[Sample], step: int) -> Experience:
        """As `Rollouts.sample`."""
        return self.rollouts.sample(samples, step)

    def next_batch(self, step: int) -> Experience:
        """A batch of as many groups as one draw has, with `score` filled; `step` plays no part in which prompts."""
        wanted = self.rollouts.order.batch_size
        kept: list[Experience] = []
        aside: list[Experience] = []
        first = self.num_drawn
        while len(kept) < wanted and self.num_drawn - first <= self.extra_rounds:
            batch = self.rollouts.draw(self.num_drawn)
            with self.scoring():
                batch = self.scores.annotate(batch)
            self.num_drawn += 1
            for rows in group_units(batch):
                group = batch.select(rows)
                (kept if carries_signal(group) else aside).append(group)
        self.report(
            {
                "rollout/rounds": Total(self.num_drawn - first),
                "rollout/groups_without_signal": Total(len(aside)),
            }
        )
        return join((kept + aside)[:wanted])


def carries_signal(group: Experience) -> bool:
    """Whether the trainable responses of one prompt have different scores."""
    scores = group.score[group.mask.any(dim=1)]
    return len(scores) > 1 and bool(scores.max() > scores.min())
