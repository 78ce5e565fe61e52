"""The learning rate as a function of the optimizer update that is about to happen, counted from 0."""

from math import cos, pi

from megarlhf.config.algorithms import PolicyGradient
from megarlhf.config.settings import Optimizer


def learning_rate(update: int, total: int, optimizer: Optimizer) -> float:
    """Learning rate of update `update` of `total`: warm-up from 0, then the schedule, at its minimum in the last one.

    The warm-up's updates get peak * 1/W, 2/W, ... W/W, so none is wasted on a rate of 0 and the peak is reached.
    A run longer than `total` goes on with the last rate.
    """
    assert update >= 0, f"update is {update}; updates are counted from 0"
    peak, floor, warmup = optimizer.learning_rate, optimizer.min_learning_rate, optimizer.warmup_updates
    if update < warmup:
        return peak * (update + 1) / warmup
    peak_at = max(warmup - 1, 0)
    progress = min((update - peak_at) / max(total - 1 - peak_at, 1), 1.0)
    if optimizer.schedule == "linear":
        return peak + (floor - peak) * progress
    if optimizer.schedule == "cosine":
        return floor + (peak - floor) * 0.5 * (1.0 + cos(pi * progress))
    return peak


def num_updates(num_samples: int, batch_size: int, num_epochs: int) -> int:
    """Optimizer updates on `num_samples` sequences a pass, `batch_size` an update; left-overs carry over to the next
    pass, and those of the last pass are not an update."""
    return num_samples * num_epochs // batch_size


def updates_per_step(settings: PolicyGradient) -> int:
    """Optimizer updates on one batch of rollouts (fewer when the target KL stops a step)."""
    return settings.num_epochs * settings.num_minibatches
