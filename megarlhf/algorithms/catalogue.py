"""An algorithm is a record of pure functions; the loop drives any of them the same way.

A new algorithm is a new value here, not a new branch in the loop.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from megarlhf.algorithms.credit import minibatch_advantages, ppo_credit
from megarlhf.algorithms.losses import clipped_policy_loss, clipped_value_loss
from megarlhf.algorithms.state import AlgorithmState, ppo_state
from megarlhf.config import algorithms as config
from megarlhf.records import Denominators, Experience, Metric, Prediction, TokenBatch

Settings = Any
"""An instance of `Algorithm.settings`: every function of one algorithm takes its own class."""
Credit = Callable[[Experience, Settings, AlgorithmState], tuple[Experience, AlgorithmState, dict[str, float]]]
Loss = Callable[[Prediction, TokenBatch, Settings, Denominators], tuple[Tensor, dict[str, Metric]]]


def _never(settings: Settings) -> bool:
    return False


def _as_it_is(minibatch: Experience, settings: Settings) -> Experience:
    return minibatch


def _as_before(state: AlgorithmState, settings: Settings, metrics: Mapping[str, float]) -> AlgorithmState:
    return state


@dataclass(frozen=True)
class Algorithm:
    """What one algorithm computes, and what it needs for that."""

    name: str
    """As the command is spelled."""
    settings: type
    """The class of its settings."""
    reads: Callable[[Settings], tuple[str, ...]]
    """Fields of the experience that stages fill before credit: they say which scorers run."""
    initial_state: Callable[[Settings], AlgorithmState]
    """What it remembers before the first step."""
    credit: Credit | None
    """(experience, settings, state) -> (experience with advantages and targets, state after it, metrics)."""
    actor_loss: Loss | None
    """(prediction, tokens, settings, denominators) -> (loss, metrics), for a model with a vocabulary head."""
    critic_loss: Loss | None
    """The same for a model with a value head; None: there is no such model."""
    prepare_minibatch: Callable[[Experience, Settings], Experience] = _as_it_is
    """(global minibatch, settings) -> the minibatch that the losses read."""
    before_scoring: Callable[[Experience, Settings], Experience] = _as_it_is
    """(new batch, settings) -> the rows that the scorers see; credit may drop those it added."""
    after_step: Callable[[AlgorithmState, Settings, Mapping[str, float]], AlgorithmState] = _as_before
    """(state, settings, the step's metrics) -> state of the next step."""
    needs_entropy: Callable[[Settings], bool] = _never
    """Whether the actor's loss reads `Prediction.entropy`."""
    keeps_groups: bool = False
    """The rows of a group must be in one micro-batch: the loss compares them."""
    value_at: Literal["before", "token"] = "before"
    """Where a value head is read for the masked token at t+1: before it, at t, or at the token itself, at t+1."""


def _ppo_reads(settings: config.PPO) -> tuple[str, ...]:
    return ("logp_rollout", "logp_start", "logp_reference", "value", "score")


PPO = Algorithm(
    name="ppo",
    settings=config.PPO,
    reads=_ppo_reads,
    initial_state=ppo_state,
    credit=ppo_credit,
    prepare_minibatch=minibatch_advantages,
    actor_loss=clipped_policy_loss,
    critic_loss=clipped_value_loss,
)
