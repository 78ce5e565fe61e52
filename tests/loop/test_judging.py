"""Verdicts are averages over both orders, in which what is due to the place cancels out."""

import math

import pytest
import torch

from megarlhf.loop.judging import Pair, Verdict, pairs_of, verdict
from megarlhf.records.prompts import Prompt

PROMPT = Prompt(3, (5,), "Hello")


def letters(p_a: float, mass: float = 1.0) -> torch.Tensor:
    return torch.tensor([math.log(p_a * mass), math.log((1 - p_a) * mass)])


@pytest.mark.parametrize(
    ("in_order", "exchanged", "gap", "agreement", "first_letter"),
    [
        (0.9, 0.2, 0.7, 1, 0.55),  # first is better, whichever letter it has
        (0.2, 0.9, -0.7, 1, 0.55),
        (0.99, 0.99, 0, 0, 0.99),  # always A
        (0.01, 0.01, 0, 0, 0.01),  # always B
        (0.95, 0.75, 0.2, 0, 0.85),  # likes A, and first a little more
    ],
)
def test_a_verdict_is_the_mean_of_both_orders(in_order, exchanged, gap, agreement, first_letter):
    found = verdict([letters(in_order, 0.5), letters(exchanged, 0.3)])
    assert found.gap == pytest.approx(gap, abs=1e-6) and found.agreement == agreement
    assert found.first_letter == pytest.approx(first_letter) and found.letter_mass == pytest.approx(0.4)


def test_equal_letters_in_both_orders_are_a_tie_to_the_last_bit():
    assert all(verdict([letters(p), letters(p)]).gap == 0.0 for p in (0.1, 0.3, 0.7, 0.99))


def test_principles_are_averaged():
    assert verdict([letters(0.9), letters(0.1), letters(0.4), letters(0.6)]).gap == pytest.approx((0.8 - 0.2) / 2)


def test_the_better_answer_is_chosen():
    pair = Pair(PROMPT, "one", "two", ("p",))
    better, worse = Verdict(0.4, 1, 0.5, 1), Verdict(-0.4, 1, 0.5, 1)
    assert better.preference(pair) == {"chosen": "one", "rejected": "two", "margin": 0.4, "principles": ("p",)}
    assert worse.preference(pair) == {"chosen": "two", "rejected": "one", "margin": 0.4, "principles": ("p",)}


def test_all_pairs_of_a_prompts_answers_are_compared():
    pairs = pairs_of([PROMPT, PROMPT, PROMPT], [["a", "b", "c"], ["d"], []], ["p"], 1, seed=0)
    assert [(pair.first, pair.second) for pair in pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
