"""From a judge's log-probs of letters to preferences: pairs of answers, asked about in both orders.

A judge likes the letter A, or whatever stands first, for reasons of its own. Every pair is therefore asked about twice,
with the answers exchanged, and the two probabilities are averaged: what is due to the place cancels out, and a judge
that always says A prefers nothing. (Constitutional AI, Bai et al. 2022, section 4.1, reads the letters' probabilities
in the same way, in one order.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from megarlhf.data.principles import draw_principles
from megarlhf.data.questions import Choice, comparison
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.records.prompts import Prompt


@dataclass(frozen=True)
class Pair:
    """Two answers to a prompt, and the principles by which they are compared."""

    prompt: Prompt
    first: str
    second: str
    principles: tuple[str, ...]

    def questions(self, tokenizer: Tokenizer) -> list[Choice]:
        """For each principle two: `first` is answer A, then `second` is."""
        orders = [(self.first, self.second), (self.second, self.first)]
        return [comparison(tokenizer, self.prompt, a, b, one) for one in self.principles for a, b in orders]


@dataclass(frozen=True)
class Verdict:
    """What the judge makes of a pair."""

    gap: float
    """P(first is better) - P(second is better), averaged over orders and principles: -1 to 1."""
    agreement: float
    """Share of the principles for which both orders name the same answer."""
    first_letter: float
    """Mean P(A) among the letters: 0.5 when the place does not matter."""
    letter_mass: float
    """Mean P(A) + P(B) among the whole vocabulary: small when the judge would rather say something else."""

    def preference(self, pair: Pair) -> dict[str, object]:
        """The row of a preference file: `margin` is the gap, above 0."""
        chosen, rejected = (pair.first, pair.second) if self.gap > 0 else (pair.second, pair.first)
        return {"chosen": chosen, "rejected": rejected, "margin": abs(self.gap), "principles": pair.principles}


def pairs_of(
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[str]],
    principles: Sequence[str],
    num_principles: int,
    seed: int,
) -> list[Pair]:
    """All pairs among each prompt's answers, each with its own draw of principles."""
    return [
        Pair(prompt, texts[i], texts[j], draw_principles(principles, num_principles, seed, prompt.row_id, i, j))
        for prompt, texts in zip(prompts, answers, strict=True)
        for i, j in combinations(range(len(texts)), 2)
    ]


def verdict(logps: Sequence[torch.Tensor]) -> Verdict:
    """Of the log-probs [2] of A and B in each question of a pair, in the order of `Pair.questions`.

    With a = P(A | A or B) when `first` is A and b = the same when `second` is A, one principle's gap is
    P(first) - P(second) = (a + (1 - b)) / 2 - ((1 - a) + b) / 2 = a - b.
    """
    table = torch.stack(list(logps)).double()
    prefers_a = (table[:, 0] - table[:, 1]).sigmoid()
    a, b = prefers_a[0::2], prefers_a[1::2]
    return Verdict(
        gap=float((a - b).mean()),
        agreement=float(((a > 0.5) == (b < 0.5)).double().mean()),
        first_letter=float(prefers_a.mean()),
        letter_mass=float(table.exp().sum(1).mean()),
    )
