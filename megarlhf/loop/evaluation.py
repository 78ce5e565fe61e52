"""Two models under one judge: mean scores and who wins, with 95 % intervals, paired by prompt.

A prompt is the unit: its samples are averaged first, for they are no independent evidence about the models.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megarlhf.errors import DataError
from megarlhf.loop.serving import Served
from megarlhf.models.score_config import ScoreRule, label_names
from megarlhf.records.experience import Experience
from megarlhf.rewards.server import Refusal
from megarlhf.rewards.sources import request_body

Z = 1.959963984540054
"""Of a normal distribution, 95 % lies within so many deviations."""


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval; of a single prompt low and high are NaN."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"

    def numbers(self, name: str) -> dict[str, float | None]:
        """For programs; JSON has no NaN."""
        found = {name: self.mean, f"{name}_low": self.low, f"{name}_high": self.high}
        return {key: None if math.isnan(value) else value for key, value in found.items()}


@dataclass(frozen=True)
class Duel:
    """One model against another on the same prompts."""

    difference: Interval
    """Of the mean scores."""
    win_rate: Interval
    """Share of pairs of answers to a prompt in which the first model's scores higher; a tie counts half."""
    wins: float
    ties: float
    losses: float
    """Shares of the pairs."""


def mean_interval(values: torch.Tensor) -> Interval:
    """Of [N] independent values: mean and 1.96 standard errors (std with N - 1, over the root of N)."""
    mean = float(values.double().mean())
    if len(values) < 2:
        return Interval(mean, math.nan, math.nan)
    error = Z * float(values.double().std()) / math.sqrt(len(values))
    return Interval(mean, mean - error, mean + error)


def share_interval(share: float, count: int) -> Interval:
    """Wilson's score interval (Wilson, 1927) of a share among `count`: it stays within 0 and 1, and has a width where
    all win. For means of values between 0 and 1, as with ties, it is too wide rather than too narrow."""
    middle = (share + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z / (1 + Z * Z / count) * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    return Interval(share, middle - half, middle + half)


def duel(scores: torch.Tensor, others: torch.Tensor, tie_margin: float) -> Duel:
    """Scores [prompts, samples] of two models. Each sample of one meets every sample of the other on its prompt; scores
    that differ by at most `tie_margin` are a tie."""
    gap = scores.double()[:, :, None] - others.double()[:, None, :]
    won, tied = (gap > tie_margin).double(), (gap.abs() <= tie_margin).double()
    by_prompt = (won + 0.5 * tied).flatten(1).mean(1)
    return Duel(
        difference=mean_interval(scores.double().mean(1) - others.double().mean(1)),
        win_rate=share_interval(float(by_prompt.mean()), len(by_prompt)),
        wins=float(won.mean()),
        ties=float(tied.mean()),
        losses=1 - float(won.mean()) - float(tied.mean()),
    )


@dataclass(frozen=True)
class TextJudge:
    """A reward model for the texts of any model: ids where the tokenizers are the same, else the texts as it reads
    them."""

    served: Served
    tokenizer: str
    """Fingerprint of the tokenizer that the ids belong to."""

    @property
    def rule(self) -> ScoreRule:
        """How the labels' scores become one."""
        return self.served.rule

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the K labels."""
        return label_names(self.served.model.architecture)

    def raw_scores(self, experience: Experience) -> torch.Tensor:
        """[B, K] float32, as the head gives them. Collective over the world; raises DataError for a row it cannot
        read."""
        try:
            question = self.served.question(request_body(experience, self.tokenizer))
        except Refusal as refusal:
            raise DataError(f"--rm: {refusal}") from refusal
        return torch.tensor(self.served.answer(question)["raw_scores"], dtype=torch.float32)


@dataclass(frozen=True)
class Answered:
    """A model's answers, `samples` to each prompt, with their scores."""

    name: str
    batch: Experience
    samples: int

    @property
    def scores(self) -> torch.Tensor:
        """[prompts, samples] float32."""
        assert self.batch.score is not None
        return self.batch.score.view(-1, self.samples)

    @property
    def row(self) -> str:
        """Of the table."""
        return f"{self.name:28.28} {mean_interval(self.scores.mean(1))}  {self.length:7.1f}  {100 * self.ended:5.1f} %"

    @property
    def length(self) -> float:
        """Mean tokens of an answer."""
        return float(self.batch.mask.sum(1).double().mean())

    @property
    def ended(self) -> float:
        """Share of answers that ended by themselves."""
        return float(self.batch.finished.double().mean())


def table(models: Sequence[Answered], tie_margin: float) -> tuple[str, dict[str, int | float | str | None]]:
    """What to read, and the same as numbers."""
    lines = [
        f"{'model':28} {'mean score, 95 % interval':29}  {'tokens':>7}  {'ended':>7}",
        *(one.row for one in models),
    ]
    numbers: dict[str, int | float | str | None] = {}
    for one, name in zip(models, ("", "other_"), strict=False):
        numbers |= {f"{name}model": one.name, **mean_interval(one.scores.mean(1)).numbers(f"{name}score")}
        numbers |= {f"{name}tokens": one.length, f"{name}ended": one.ended}
    numbers |= {"num_prompts": len(models[0].scores), "samples_per_prompt": models[0].samples}
    if len(models) == 2:
        found = duel(models[0].scores, models[1].scores, tie_margin)
        lines += [
            f"{'difference':28} {found.difference}",
            f"{models[0].name} wins {100 * found.wins:.1f} %, ties {100 * found.ties:.1f} %, loses "
            f"{100 * found.losses:.1f} %: win rate {found.win_rate.mean:.3f} "
            f"[{found.win_rate.low:.3f}, {found.win_rate.high:.3f}] over {len(models[0].scores)} prompts",
        ]
        numbers |= found.difference.numbers("difference") | found.win_rate.numbers("win_rate")
        numbers |= {"wins": found.wins, "ties": found.ties, "losses": found.losses}
    return "\n".join(lines), numbers


def rows_of(models: Sequence[Answered], id_of: Callable[[int], object]) -> list[Mapping[str, object]]:
    """A line per prompt and sample: the prompt, and each model's answer with its score. `id_of(row)`: the prompt's
    id."""
    found: list[Mapping[str, object]] = []
    for row in range(models[0].batch.num_rows):
        line: dict[str, object] = {
            "id": id_of(row),
            "sample": row % models[0].samples,
            "prompt": models[0].batch.prompts[row],
        }
        for one, name in zip(models, ("", "other_"), strict=False):
            batch = one.batch
            assert batch.score is not None
            line |= {
                f"{name}response": batch.responses[row],
                f"{name}score": float(batch.score[row]),
                f"{name}tokens": int(batch.mask[row].sum()),
                f"{name}finished": bool(batch.finished[row]),
            }
        found.append(line)
    return found
