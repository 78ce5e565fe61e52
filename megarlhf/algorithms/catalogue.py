"""An algorithm is a record of pure functions; the loop drives any of them the same way.

A new algorithm is a new value here, not a new branch in the loop.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from megarlhf.algorithms import credit, losses, preferences, reward_model, state
from megarlhf.algorithms.state import AlgorithmState
from megarlhf.config import algorithms as config
from megarlhf.records import Denominators, Experience, Metric, Prediction, TokenBatch
from megarlhf.records.shards import WHOLE, Shard

Settings = Any
"""An instance of `Algorithm.settings`: every function of one algorithm takes its own class."""
Credit = Callable[[Experience, Settings, AlgorithmState, Shard], tuple[Experience, AlgorithmState, dict[str, float]]]
Loss = Callable[[Prediction, TokenBatch, Settings, Denominators], tuple[Tensor, dict[str, Metric]]]


def _never(settings: Settings) -> bool:
    return False


def _as_it_is(batch: Experience, settings: Settings, shard: Shard = WHOLE) -> Experience:
    return batch


def _settings_as_they_are(settings: Settings, state: AlgorithmState) -> Settings:
    return settings


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
    """(experience, settings, state, which shard of the batch it is) -> (experience with advantages and targets, state
    after it, metrics)."""
    actor_loss: Loss | None
    """(prediction, tokens, settings, denominators) -> (loss, metrics), for a model with a vocabulary head."""
    critic_loss: Loss | None
    """The same for a model with a value head; None: there is no such model."""
    prepare_minibatch: Callable[[Experience, Settings, Shard], Experience] = _as_it_is
    """(global minibatch, or a shard of it, settings, which shard) -> the minibatch that the losses read."""
    before_scoring: Callable[[Experience, Settings], Experience] = _as_it_is
    """(new batch, settings) -> the rows that the scorers see; credit may drop those it added."""
    after_step: Callable[[AlgorithmState, Settings, Mapping[str, float]], AlgorithmState] = _as_before
    """(state, settings, the step's metrics) -> state of the next step."""
    settings_now: Callable[[Settings, AlgorithmState], Settings] = _settings_as_they_are
    """(settings, state before this step's credit) -> settings with the step's coefficients, for the losses."""
    needs_entropy: Callable[[Settings], bool] = _never
    """Whether the actor's loss reads `Prediction.entropy`."""
    keeps_groups: bool = False
    """The rows of a group must be in one micro-batch: the loss compares them."""
    value_at: Literal["before", "token"] = "before"
    """Where a value head is read for the masked token at t+1: before it, at t, or at the token itself, at t+1."""


PPO = Algorithm(
    name="ppo",
    settings=config.PPO,
    reads=credit.ppo_reads,
    initial_state=state.ppo_state,
    credit=credit.ppo_credit,
    prepare_minibatch=credit.minibatch_advantages,
    actor_loss=losses.ppo_policy_loss,
    critic_loss=losses.clipped_value_loss,
    after_step=state.after_ppo_step,
    settings_now=state.ppo_settings_now,
    needs_entropy=losses.needs_entropy,
)


def _without_critic(name: str, settings: type, assign: Credit) -> Algorithm:
    return Algorithm(
        name=name,
        settings=settings,
        reads=credit.policy_reads,
        initial_state=state.policy_state,
        credit=assign,
        prepare_minibatch=credit.minibatch_advantages,
        actor_loss=losses.clipped_policy_loss,
        critic_loss=None,
        settings_now=state.policy_settings_now,
        needs_entropy=losses.needs_entropy,
    )


GRPO = _without_critic("grpo", config.GRPO, credit.grpo_credit)
RLOO = _without_critic("rloo", config.RLOO, credit.rloo_credit)
REINFORCE_PLUS_PLUS = _without_critic("reinforce++", config.ReinforcePlusPlus, credit.reinforce_plus_plus_credit)

DPO = Algorithm(
    name="dpo",
    settings=config.DPO,
    reads=preferences.dpo_reads,
    initial_state=state.no_state,
    credit=None,
    actor_loss=preferences.dpo_loss,
    critic_loss=None,
    keeps_groups=True,
)

KTO = Algorithm(
    name="kto",
    settings=config.KTO,
    reads=preferences.kto_reads,
    initial_state=state.no_state,
    before_scoring=preferences.with_mismatched,
    credit=preferences.kto_credit,
    actor_loss=preferences.kto_loss,
    critic_loss=None,
)

SFT = Algorithm(
    name="sft",
    settings=config.SFT,
    reads=preferences.sft_reads,
    initial_state=state.no_state,
    credit=None,
    actor_loss=preferences.sft_loss,
    critic_loss=None,
)

REWARD_MODELLING = Algorithm(
    name="rm",
    settings=config.RewardModelling,
    reads=reward_model.reward_reads,
    initial_state=state.no_state,
    credit=None,
    actor_loss=None,
    critic_loss=reward_model.reward_loss,
    keeps_groups=True,
    value_at="token",
)

ALGORITHMS = {
    algorithm.name: algorithm for algorithm in (PPO, GRPO, RLOO, REINFORCE_PLUS_PLUS, DPO, KTO, SFT, REWARD_MODELLING)
}
"""By the name of their command."""
