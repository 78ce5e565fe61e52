"""Means and variances: of some valid tokens, of groups of rows, and of all scores that a run has seen.

Sums are in float64. Values that are all equal therefore have a deviation of exactly 0 and lie exactly on their mean.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megarlhf.records.experience import scatter_flat, valid_values

_VARIANCE_EPSILON = 1e-8


class Moments(NamedTuple):
    """Mean and variance of some valid tokens. The variance is the unbiased one (divided by count - 1)."""

    mean: float
    variance: float


def moments(values: Tensor, mask: Tensor) -> Moments:
    """Moments of values [B, T] where mask [B, T], summed in float64. The variance of fewer than two is 0."""
    valid = valid_values(values, mask).to(torch.float64)
    if not len(valid):
        return Moments(0.0, 0.0)
    return Moments(float(valid.mean()), float(valid.var(unbiased=True)) if len(valid) > 1 else 0.0)


def standardise(values: Tensor, mask: Tensor, over: Moments, *, keep_mean: bool = False) -> Tensor:
    """[B, T] float32: (values - mean) / sqrt(variance + 1e-8), plus the mean again with `keep_mean`; 0 where masked.

    Values that are all equal become exactly 0: the subtraction is in float64, so there is no rounding to blow up.
    """
    valid = valid_values(values, mask).to(torch.float64)
    valid.sub_(over.mean).div_((over.variance + _VARIANCE_EPSILON) ** 0.5).add_(over.mean if keep_mean else 0.0)
    return scatter_flat(valid, mask)


def whiten(values: Tensor, mask: Tensor, *, keep_mean: bool = False) -> Tensor:
    """`standardise` by the values' own moments."""
    return standardise(values, mask, moments(values, mask), keep_mean=keep_mean)


@dataclass(frozen=True)
class RunningMoments:
    """Of all values seen so far, merged batch by batch (Chan, Golub and LeVeque, 1983)."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances to the mean."""

    def seen(self, values: Tensor) -> "RunningMoments":
        """The moments with `values` (of any shape and dtype) among them."""
        if not values.numel():
            return self
        batch = values.to(torch.float64)
        number, mean = float(batch.numel()), float(batch.mean())
        squares, total, distance = float((batch - mean).square().sum()), self.count + number, mean - self.mean
        return RunningMoments(
            count=total,
            mean=self.mean + distance * number / total,
            squares=self.squares + squares + distance**2 * self.count * number / total,
        )

    @property
    def deviation(self) -> float:
        """Unbiased standard deviation; 1 when it would be 0, so that dividing by it does no harm."""
        variance = self.squares / (self.count - 1) if self.count > 1 else 0.0
        return variance**0.5 if variance > 0 else 1.0
