"""Claims about learning rates."""

import math

import pytest

from megarlhf.algorithms.schedule import learning_rate, num_updates, updates_per_step
from megarlhf.config.settings import PPO, Optimizer


def test_the_number_of_updates_carries_accumulation_over_epochs():
    assert num_updates(num_samples=1000, batch_size=128, num_epochs=3) == 23
    assert num_updates(num_samples=64 * 4, batch_size=64, num_epochs=2) == 8
    assert updates_per_step(PPO(num_epochs=2, num_minibatches=4)) == 8


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_the_peak_is_reached_and_the_minimum_comes_exactly_at_the_last_update(schedule, warmup):
    optimizer = Optimizer(learning_rate=1.0, min_learning_rate=0.1, schedule=schedule, warmup_updates=warmup)
    rates = [learning_rate(update, 23, optimizer) for update in range(23)]
    assert max(rates) == 1.0 and abs(rates[-1] - 0.1) < 1e-12 and rates[-2] > rates[-1]
    peak = rates.index(1.0)
    assert peak == max(warmup - 1, 0)
    assert rates[:peak] == sorted(rates[:peak]) and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert abs(learning_rate(100, 23, optimizer) - 0.1) < 1e-12


def test_warm_up_rises_linearly_from_0():
    optimizer = Optimizer(learning_rate=0.8, warmup_updates=4)
    assert [learning_rate(update, 10, optimizer) for update in range(6)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 0.8, 0.8]
    )


def test_shapes_between_the_ends():
    linear = Optimizer(learning_rate=1.0, schedule="linear")
    cosine = Optimizer(learning_rate=1.0, schedule="cosine")
    assert [learning_rate(u, 5, linear) for u in range(5)] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    expected = [(1 + math.cos(math.pi * u / 4)) / 2 for u in range(5)]
    assert [learning_rate(u, 5, cosine) for u in range(5)] == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_single_update_gets_the_peak(schedule):
    assert learning_rate(0, 1, Optimizer(learning_rate=1.0, schedule=schedule)) == 1.0


def test_a_warm_up_longer_than_the_run_never_reaches_the_peak():
    optimizer = Optimizer(learning_rate=1.0, schedule="cosine", warmup_updates=10)
    assert [learning_rate(u, 3, optimizer) for u in range(3)] == pytest.approx([0.1, 0.2, 0.3])
