"""Examples as the batch of a step: answers become rows, and a rule says at which tokens they are learnt from."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from megarlhf.config.corpus import Negatives
from megarlhf.data.examples import Answer, Example
from megarlhf.data.negatives import spoil
from megarlhf.data.order import PromptOrder
from megarlhf.records.experience import Experience

MaskRule = Literal["response", "all", "last", "divergence"]
"""Tokens in the mask: those of the answer; those of the prompt too (but the first, which nothing predicts); the last
token of each row; or from where the answers to a prompt first differ, to each row's end."""


def corpus_experience(examples: Sequence[Example], mask: MaskRule) -> Experience:
    """One row per answer, in order; answers to one prompt share a group. What the data set says of them is filled in.

    `preference`, `score` and `attributes` are None in a batch without any; `margin` is 0 where a comparison has none.
    """
    pairs = [(group, example, answer) for group, example in enumerate(examples) for answer in example.answers]
    answers = [answer for _, _, answer in pairs]
    experience = Experience.from_completions(
        [example.prompt_ids for _, example, _ in pairs],
        [answer.token_ids for answer in answers],
        None,
        row_id=[example.row_id for _, example, _ in pairs],
        group=[group for group, _, _ in pairs],
        finished=[answer.finished for answer in answers],
        prompts=[example.prompt for _, example, _ in pairs],
        responses=[answer.text for answer in answers],
        metadata=[example.metadata for _, example, _ in pairs],
    )
    return _MASKS[mask](experience, examples).replace(
        preference=_numbers([answer.preference for answer in answers]),
        margin=_numbers([_margin(answer) for answer in answers]),
        score=_numbers([answer.score for answer in answers]),
        attributes=_attributes([answer.attributes for answer in answers]),
    )


@dataclass(frozen=True)
class CorpusBatches:
    """The source of a step's batch: a pure function of the step, so that a resumed run goes on where it stopped."""

    examples: Sequence[Example]
    order: PromptOrder
    mask: MaskRule
    negatives: Negatives = Negatives()
    """Comparisons with spoilt answers; none by default."""

    @property
    def num_rows(self) -> int:
        """Examples of the data set."""
        return len(self.examples)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row: spoilt answers do not make longer ones."""
        return max(example.num_tokens for example in self.examples)

    def next_batch(self, step: int) -> Experience:
        """The batch of `step`, counted from 0."""
        batch = [self.examples[index] for index in self.order.batch(step)]
        if self.negatives.share:
            epochs = self.order.epochs(step)
            batch = [self._spoilt(example, epoch) for example, epoch in zip(batch, epochs, strict=True)]
        return corpus_experience(batch, self.mask)

    def _spoilt(self, example: Example, epoch: int) -> Example:
        return spoil(example, self.examples, self.negatives, self.longest, seed=self.order.seed, epoch=epoch)


def _margin(answer: Answer) -> float | None:
    return 0.0 if answer.margin is None and answer.preference is not None else answer.margin


def _numbers(values: Sequence[float | None]) -> Tensor | None:
    """[B] float32, or None when no row has a number."""
    if all(value is None for value in values):
        return None
    return torch.tensor([0.0 if value is None else value for value in values], dtype=torch.float32)


def _attributes(rows: Sequence[tuple[float | None, ...] | None]) -> Tensor | None:
    """[B, K] float32 with NaN for what is missing, or None when no row has attributes."""
    given = [row for row in rows if row is not None]
    if not given:
        return None
    assert len(given) == len(rows), "some answers have attributes, others none at all"
    return torch.tensor([[math.nan if one is None else one for one in row] for row in given], dtype=torch.float32)


def _response(experience: Experience, examples: Sequence[Example]) -> Experience:
    """The answers' tokens; in conversations, those of the assistant's turns only."""
    mask = experience.mask.clone()
    answers = [answer for example in examples for answer in example.answers]
    for row, answer in enumerate(answers):
        if answer.trained is not None:
            mask[row, mask[row].clone()] = torch.tensor(answer.trained)
    return experience.replace(mask=mask)


def _all(experience: Experience, examples: Sequence[Example]) -> Experience:
    """Every token that another one precedes. The whole row counts as response: prompt_lengths are 1."""
    mask = torch.arange(experience.mask.shape[1]) < experience.lengths[:, None] - 1
    return experience.replace(mask=mask, prompt_lengths=torch.ones_like(experience.prompt_lengths))


def _last(experience: Experience, examples: Sequence[Example]) -> Experience:
    """The last token of each row."""
    return experience.replace(mask=torch.arange(experience.mask.shape[1]) == experience.lengths[:, None] - 2)


def _divergence(experience: Experience, examples: Sequence[Example]) -> Experience:
    """From the first token at which the answers to a prompt differ; at least the last token."""
    starts = [start for example in examples for start in [_divergence_point(example.answers)] * len(example.answers)]
    first = experience.prompt_lengths - 1 + torch.tensor(starts)
    first = torch.minimum(first, experience.lengths - 2)
    return experience.replace(mask=experience.mask & (torch.arange(experience.mask.shape[1]) >= first[:, None]))


def _divergence_point(answers: Sequence[Answer]) -> int:
    """Number of tokens at the start that all answers have in common."""
    columns = zip(*(answer.token_ids for answer in answers), strict=False)
    return next((at for at, column in enumerate(columns) if len(set(column)) > 1), min(map(_length, answers)))


def _length(answer: Answer) -> int:
    return len(answer.token_ids)


_MASKS: dict[MaskRule, Callable[[Experience, Sequence[Example]], Experience]] = {
    "response": _response,
    "all": _all,
    "last": _last,
    "divergence": _divergence,
}
