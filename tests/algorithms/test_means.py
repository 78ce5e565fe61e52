"""Claims about means over a global minibatch, whichever way it is split."""

import pytest
import torch

from megarlhf.algorithms.means import loss_mean, row_counts, row_means, row_sums
from megarlhf.records import Denominators, TokenBatch, merge_metrics, metric_results
from tests.algorithms.batches import bools, close, experience_of, floats

LOSSES = floats([4, 0, 0, 0], [1, 1, 1, 0], [2, 2, 0, 0], [0, 0, 0, 0], [9, 9, 9, 9])
MASK = bools([1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0])
"""The last row has no valid token."""
SPLITS = [
    [[0], [1], [2], [3], [4]],
    [[0, 1], [2, 3, 4]],
    [[0, 1, 2, 3, 4]],
    [[4], [3, 0], [1], [2]],
    [[1, 3], [0, 2, 4]],
]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("how", "expected"), [("token", 1.1), ("sequence", 1.75), ("fixed_length", 11 / 20)])
def test_every_mean_is_that_of_the_whole_for_every_split(how, expected, split):
    whole = experience_of(MASK)
    total, parts = 0.0, []
    for rows in split:
        batch = whole.select(rows)
        tokens = TokenBatch.from_experience(batch)
        loss, metric = loss_mean(LOSSES[rows][batch.mask], tokens, how, Denominators.of(whole), length=5)
        total += float(loss)
        parts.append({"loss": metric})
    assert total == pytest.approx(expected, abs=1e-6)
    assert metric_results(merge_metrics(parts))["loss"] == pytest.approx(expected, abs=1e-6)


def test_denominators_count_what_has_a_valid_token():
    whole = experience_of(MASK, group=torch.tensor([5, 5, 2, 2, 8]))
    assert Denominators.of(whole) == Denominators(tokens=10.0, rows=4.0, groups=2.0)
    assert Denominators.of(whole.select([4])) == Denominators(0.0, 0.0, 0.0)


@pytest.mark.parametrize("how", ["token", "sequence", "fixed_length"])
def test_nothing_has_loss_0_and_gradient_0(how):
    empty = experience_of(bools([0, 0]))
    tokens = TokenBatch.from_experience(empty)
    weight = torch.ones(2, requires_grad=True)
    loss, metric = loss_mean(weight[empty.mask[0]], tokens, how, Denominators.of(empty), length=5)
    loss.backward()
    assert float(loss.detach()) == 0.0 and weight.grad.tolist() == [0, 0] and metric.result() is None


def test_sums_and_means_by_row():
    tokens = TokenBatch.from_experience(experience_of(MASK))
    close(row_counts(tokens), [1, 3, 2, 4, 0])
    close(row_sums(LOSSES[MASK], tokens), [4, 3, 4, 0, 0])
    close(row_means(LOSSES[MASK], tokens), [4, 1, 2, 0, 0])


def test_a_fixed_length_must_be_given():
    tokens = TokenBatch.from_experience(experience_of(MASK))
    with pytest.raises(AssertionError, match="loss_length above 0"):
        loss_mean(LOSSES[MASK], tokens, "fixed_length", Denominators(10.0, 4.0, 4.0))
