"""Metrics that add up: partial results of micro-batches and ranks, merged exactly, turned into one number at the end.

A mean keeps its total and its weight, so that the result does not depend on how the batch was split.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

Number = float | Tensor


@dataclass(frozen=True)
class Mean:
    """total / weight; merging adds both."""

    total: Number
    weight: Number

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    def result(self) -> float | None:
        """None when nothing was counted: a mean over no token does not exist, and is not 0."""
        return float(self.total) / float(self.weight) if float(self.weight) else None


@dataclass(frozen=True)
class Total:
    """A sum."""

    value: Number

    def merge(self, other: "Total") -> "Total":
        return Total(self.value + other.value)

    def result(self) -> float | None:
        return float(self.value)


@dataclass(frozen=True)
class Maximum:
    """The largest value; -inf stands for none."""

    value: Number

    def merge(self, other: "Maximum") -> "Maximum":
        return Maximum(max(float(self.value), float(other.value)))

    def result(self) -> float | None:
        return None if float(self.value) == -inf else float(self.value)


Metric = Mean | Total | Maximum


def _merge(one: Any, other: Any) -> Metric:
    """Two metrics of one kind."""
    return one.merge(other)


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """One metric per name. A name may be missing from some parts."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = _merge(merged[name], metric) if name in merged else metric
    return merged


def metric_results(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The numbers to report; a metric that counted nothing is absent."""
    results = {name: metric.result() for name, metric in metrics.items()}
    return {name: value for name, value in results.items() if value is not None}


def metric_vectors(metrics: Mapping[str, Metric]) -> tuple[Tensor, Tensor]:
    """(addends, maxima), float64 on the host, in the order of the names: for an all-reduce with sum and one with max.

    Every rank must hold metrics of the same names and kinds. `metrics_from_vectors` turns the reduced vectors back.
    """
    addends: list[float] = []
    maxima: list[float] = []
    for name in sorted(metrics):
        metric = metrics[name]
        if isinstance(metric, Mean):
            addends += [float(metric.total), float(metric.weight)]
        else:
            (maxima if isinstance(metric, Maximum) else addends).append(float(metric.value))
    return torch.tensor(addends, dtype=torch.float64), torch.tensor(maxima, dtype=torch.float64)


def metrics_from_vectors(like: Mapping[str, Metric], addends: Tensor, maxima: Tensor) -> dict[str, Metric]:
    """The metrics named and typed as `like`, with the numbers of reduced vectors."""
    sums, tops = iter(addends.tolist()), iter(maxima.tolist())
    out: dict[str, Metric] = {}
    for name in sorted(like):
        if isinstance(like[name], Mean):
            out[name] = Mean(next(sums), next(sums))
        else:
            out[name] = Maximum(next(tops)) if isinstance(like[name], Maximum) else Total(next(sums))
    return out
