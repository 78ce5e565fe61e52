"""Means and variances: of some valid tokens, of groups of rows, and of all scores that a run has seen.

Sums are in float64. Values that are all equal therefore have a deviation of exactly 0 and lie exactly on their mean.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megarlhf.records.experience import scatter_flat, valid_values
from megarlhf.records.shards import WHOLE, Shard

_VARIANCE_EPSILON = 1e-8


class Moments(NamedTuple):
    """Mean and variance of some valid tokens. The variance is the unbiased one (divided by count - 1)."""

    mean: float
    variance: float


@dataclass(frozen=True)
class Spread:
    """Of some values: how many, their mean, and the sum of their squared distances to it."""

    count: float
    mean: float
    squares: float


def spread(values: Tensor, shard: Shard = WHOLE) -> Spread:
    """Of `values` (any shape and dtype) of all shards, in float64. Collective over the shards, in two rounds."""
    wide = values.to(torch.float64)
    count, mean = count_and_mean(wide, shard)
    return Spread(count, mean, float(shard.sum((wide - mean).square_().sum())))


def count_and_mean(values: Tensor, shard: Shard = WHOLE) -> tuple[float, float]:
    """How many `values` all shards have, and their mean (0 of none), in float64. Collective over the shards."""
    own = torch.stack([torch.tensor(float(values.numel())), values.sum(dtype=torch.float64)])
    count, total = shard.sum(own).tolist()
    return count, total / count if count else 0.0


def moments(values: Tensor, mask: Tensor, shard: Shard = WHOLE) -> Moments:
    """Moments of values [B, T] where mask [B, T], over all shards. The variance of fewer than two is 0."""
    over = spread(valid_values(values, mask), shard)
    return Moments(over.mean, over.squares / (over.count - 1) if over.count > 1 else 0.0)


def standardise(values: Tensor, mask: Tensor, over: Moments, *, keep_mean: bool = False) -> Tensor:
    """[B, T] float32: (values - mean) / sqrt(variance + 1e-8), plus the mean again with `keep_mean`; 0 where masked.

    Values that are all equal become exactly 0: the subtraction is in float64, so there is no rounding to blow up.
    """
    valid = valid_values(values, mask).to(torch.float64)
    valid.sub_(over.mean).div_((over.variance + _VARIANCE_EPSILON) ** 0.5).add_(over.mean if keep_mean else 0.0)
    return scatter_flat(valid, mask)


def whiten(values: Tensor, mask: Tensor, shard: Shard = WHOLE, *, keep_mean: bool = False) -> Tensor:
    """`standardise` by the moments of the values of all shards."""
    return standardise(values, mask, moments(values, mask, shard), keep_mean=keep_mean)


@dataclass(frozen=True)
class RunningMoments:
    """Of all values seen so far, merged batch by batch (Chan, Golub and LeVeque, 1983)."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances to the mean."""

    def seen(self, values: Tensor, shard: Shard = WHOLE) -> "RunningMoments":
        """The moments with `values` (of any shape and dtype) of all shards among them."""
        batch = spread(values, shard)
        if not batch.count:
            return self
        total, distance = self.count + batch.count, batch.mean - self.mean
        return RunningMoments(
            count=total,
            mean=self.mean + distance * batch.count / total,
            squares=self.squares + batch.squares + distance**2 * self.count * batch.count / total,
        )

    @property
    def deviation(self) -> float:
        """Unbiased standard deviation; 1 when it would be 0, so that dividing by it does no harm."""
        variance = self.squares / (self.count - 1) if self.count > 1 else 0.0
        return variance**0.5 if variance > 0 else 1.0
