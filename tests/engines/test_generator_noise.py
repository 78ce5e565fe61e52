"""The noise is what it says (Gumbel, independent over keys) and depends on its key only."""

import math

import pytest
import torch

from megarlhf.engines.generator.noise import gumbel, row_keys


def keys_of(*, seed=0, step=0, rows=(0,), samples=(0,)) -> torch.Tensor:
    return row_keys(seed, step, torch.tensor(rows), torch.tensor(samples))


def uniform(keys: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The uniform number behind the noise: exp(-exp(-g)) is 1 - u."""
    return 1 - (-(-gumbel(keys, positions, ids).double()).exp()).exp()


def hash_in_python(seed: int, step: int, row: int, sample: int, position: int, token: int) -> float:
    """The documented hash with Python's unbounded integers."""
    key = 0
    for field in (seed, step, row, sample, position):
        x = (key + (field + 1) * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        key = x ^ (x >> 31)
    x = (token * 0x9E3779B1 % 2**32) ^ (key % 2**32)
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x + (key >> 32)) % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    x ^= x >> 16
    u = min((x + 0.5) / 2**32, 1 - 2.0**-24)
    return -math.log(-math.log1p(-u))


def test_noise_is_the_documented_hash():
    keys = keys_of(seed=3, step=17, rows=(5, 2**40), samples=(0, 7))
    noise = gumbel(keys, torch.tensor([4, 1000]), torch.tensor([0, 1, 31999, 151935]))
    for b, (row, sample, position) in enumerate([(5, 0, 4), (2**40, 7, 1000)]):
        for m, token in enumerate([0, 1, 31999, 151935]):
            expected = hash_in_python(3, 17, row, sample, position, token)
            assert float(noise[b, m]) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_noise_does_not_depend_on_batch_order_size_or_vocabulary_shard():
    keys = keys_of(rows=tuple(range(7)), samples=(0, 1, 2, 0, 1, 2, 0))
    positions, ids = torch.arange(7), torch.arange(30000)
    whole = gumbel(keys, positions, ids)
    order = torch.tensor([3, 0, 6])
    part = gumbel(keys[order], positions[order], ids[1234:20000])
    assert torch.equal(part, whole[order, 1234:20000])


def test_every_part_of_the_key_matters():
    base = {"seed": 1, "step": 2, "rows": (3,), "samples": (4,)}
    ids, position = torch.arange(64), torch.tensor([5])
    first = gumbel(keys_of(**base), position, ids)
    for change in ({"seed": 2}, {"step": 3}, {"rows": (4,)}, {"samples": (5,)}):
        assert not torch.isclose(gumbel(keys_of(**(base | change)), position, ids), first).any(), change
    assert not torch.isclose(gumbel(keys_of(**base), position + 1, ids), first).any()


def test_uniform_numbers_pass_chi_square_and_kolmogorov_smirnov():
    keys = keys_of(rows=range(10), samples=[0] * 10)
    numbers = uniform(keys, torch.zeros(10, dtype=torch.int64), torch.arange(20000))
    numbers = numbers.flatten()
    counts = torch.histc(numbers.float(), 200, 0, 1)
    expected = len(numbers) / 200
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 199) < 4 * math.sqrt(2 * 199)
    ordered, ranks = numbers.sort().values, torch.arange(1, len(numbers) + 1) / len(numbers)
    assert float((ordered - ranks).abs().max()) * math.sqrt(len(numbers)) < 1.95  # p = 0.001


@pytest.mark.parametrize("field", ["row", "sample", "position", "token"])
def test_neighbouring_keys_are_independent(field):
    # pairs (u of n, u of n + 1) fill an 8 x 8 grid evenly
    numbers = torch.arange(40000)
    zeros = torch.zeros_like(numbers)
    by_field = {"row": zeros, "sample": zeros, "position": zeros} | {field: numbers}
    if field == "token":
        u = uniform(keys_of(), torch.tensor([0]), numbers)[0]
    else:
        u = uniform(row_keys(0, 0, by_field["row"], by_field["sample"]), by_field["position"], torch.tensor([11]))[:, 0]
    cells = (u * 8).long().clamp(0, 7)
    counts = torch.bincount(cells[:-1] * 8 + cells[1:], minlength=64).double()
    expected = counts.sum() / 64
    assert abs(float(((counts - expected) ** 2 / expected).sum()) - 63) < 4 * math.sqrt(2 * 63)


def test_rows_are_uncorrelated_over_the_vocabulary():
    noise = gumbel(keys_of(rows=range(40), samples=[0] * 40), torch.zeros(40, dtype=torch.int64), torch.arange(8000))
    correlation = torch.corrcoef(noise) - torch.eye(40)
    assert float(correlation.abs().max()) < 5 / math.sqrt(8000)


def test_large_noise_keeps_the_tail_of_the_gumbel_distribution():
    keys = keys_of(rows=range(100), samples=[0] * 100)
    noise = gumbel(keys, torch.zeros(100, dtype=torch.int64), torch.arange(20000))
    for threshold in (5.0, 8.0, 10.0):
        expected = noise.numel() * -math.expm1(-math.exp(-threshold))
        assert abs(int((noise > threshold).sum()) - expected) < 4 * math.sqrt(expected)
    assert torch.isfinite(noise).all()
