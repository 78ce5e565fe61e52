"""Claims about means and variances."""

import pytest
import torch

from megarlhf.algorithms.moments import RunningMoments, moments, whiten
from tests.algorithms.batches import bools, close, floats

MASK = bools([1, 1, 1, 1, 1], [1, 1, 1, 0, 0])
ADVANTAGE = floats([0.314536, 0.325744, 0.3552, 0.41, 0.5], [-0.64832, -0.706, -0.8, 0, 0])


def test_whitening_sees_valid_tokens_only_and_uses_the_unbiased_variance():
    found = moments(ADVANTAGE, MASK)
    assert abs(found.mean + 0.031105) < 1e-6 and abs(found.variance - 0.328618) < 1e-6
    expected = [[0.602947, 0.6225, 0.673884, 0.769479, 0.926478], [-1.076691, -1.17731, -1.341287, 0, 0]]
    close(whiten(ADVANTAGE, MASK), expected)
    noisy = torch.where(MASK, ADVANTAGE, 1e6)
    assert torch.equal(whiten(noisy, MASK), whiten(ADVANTAGE, MASK))


def test_rewards_keep_their_mean_when_scaled():
    values = floats([1, 2, 6, 9], [3, 0, 0, 0])
    mask = bools([1, 1, 1, 0], [1, 0, 0, 0])
    found = whiten(values, mask, keep_mean=True)[mask]
    assert abs(float(found.mean()) - 3.0) < 1e-6 and abs(float(found.var()) - 1.0) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [0.1, 0.95, 1e4])
def test_equal_values_whiten_to_exactly_0(value, dtype):
    for count in (1, 4, 7, 8, 1000):
        values = torch.full((1, count), value).to(dtype)
        assert not whiten(values, torch.ones(1, count, dtype=torch.bool)).any()


def test_whitening_nothing_is_0():
    assert whiten(floats([1, 2]), bools([0, 0])).tolist() == [[0, 0]]


@pytest.mark.parametrize("sizes", [[5, 0, 7, 1], [13], [1] * 13])
def test_running_moments_are_those_of_all_values_together(sizes):
    values = torch.randn(13, generator=torch.Generator().manual_seed(0)) + 100.0
    running = RunningMoments()
    for part in values.split(sizes):
        running = running.seen(part)
    assert running.count == 13
    assert running.mean == pytest.approx(float(values.double().mean()), abs=1e-9)
    assert running.deviation == pytest.approx(float(values.double().std()), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_deviation_of_0_divides_by_1(dtype):
    assert RunningMoments().deviation == RunningMoments().seen(torch.ones(1)).deviation == 1.0
    assert RunningMoments().seen(torch.full((7,), 0.1, dtype=dtype)).deviation == 1.0


@pytest.mark.parametrize("keep_mean", [True, False])
def test_whitening_only_the_valid_values_is_whitening_all_and_masking(keep_mean):
    values = torch.randn(7, 11, generator=torch.Generator().manual_seed(0)) * 3 + 1
    mask = torch.rand(7, 11, generator=torch.Generator().manual_seed(1)) < 0.5
    wide, over = values.double(), moments(values, mask)
    whole = (wide - over.mean) / (over.variance + 1e-8) ** 0.5 + (over.mean if keep_mean else 0.0)
    assert torch.equal(whiten(values, mask, keep_mean=keep_mean), torch.where(mask, whole, 0.0).float())
