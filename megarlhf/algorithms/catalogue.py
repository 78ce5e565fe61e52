"""An algorithm is a record of pure functions; the loop drives any of them the same way.

A new algorithm is a new value here, not a new branch in the loop.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megarlhf.algorithms.credit import minibatch_advantages, ppo_credit
from megarlhf.algorithms.losses import clipped_policy_loss, clipped_value_loss
from megarlhf.config import settings
from megarlhf.records import Experience, Metric, TokenBatch

Credit = Callable[[Experience, settings.PPO, float], tuple[Experience, dict[str, float]]]
Prepare = Callable[[Experience, settings.PPO], Experience]
Loss = Callable[[Tensor, TokenBatch, settings.PPO, float], tuple[Tensor, dict[str, Metric]]]


@dataclass(frozen=True)
class Algorithm:
    """What one algorithm computes, and what it needs for that."""

    name: str
    """As the command is spelled."""
    reads: tuple[str, ...]
    """Fields of the experience that stages fill before credit: they say which scorers run."""
    credit: Credit
    """(experience, settings, KL coefficient) -> (experience with advantages and targets, metrics)."""
    prepare_minibatch: Prepare
    """(global minibatch, settings) -> the minibatch that the losses read."""
    actor_loss: Loss
    """(log-probs [N], tokens, settings, denominator) -> (loss, metrics)."""
    critic_loss: Loss | None
    """(values [N], tokens, settings, denominator) -> (loss, metrics); None: no critic."""


PPO = Algorithm(
    name="ppo",
    reads=("logp_rollout", "logp_start", "logp_reference", "value", "score"),
    credit=ppo_credit,
    prepare_minibatch=minibatch_advantages,
    actor_loss=clipped_policy_loss,
    critic_loss=clipped_value_loss,
)
