"""What an algorithm remembers from one step to the next, as a value: it is saved with a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from megarlhf.algorithms.kl_control import FixedKL, KLController, kl_controller
from megarlhf.algorithms.moments import RunningMoments
from megarlhf.config.algorithms import PPO, PolicyGradient
from megarlhf.records.shards import WHOLE, Shard

_PENALTY_BAND, _PENALTY_FACTOR = 1.5, 2.0


@dataclass(frozen=True)
class AlgorithmState:
    """The same on every rank: it is computed from the whole batch and from reduced metrics."""

    kl: KLController = FixedKL(0.0)
    """Coefficient of the KL penalty to the reference."""
    scores: RunningMoments = RunningMoments()
    """Of all scores so far, for normalising them."""
    penalty: float = 0.0
    """PPO-KL's beta: coefficient of KL(old, new)."""

    def numbers(self) -> dict[str, float]:
        """All that `restored` needs to continue from here, for a checkpoint."""
        return {
            "kl_coef": self.kl.coefficient,
            "scores_count": self.scores.count,
            "scores_mean": self.scores.mean,
            "scores_squares": self.scores.squares,
            "penalty": self.penalty,
        }

    def restored(self, numbers: Mapping[str, float]) -> "AlgorithmState":
        """This state (an initial one: it knows the targets) moved to where `numbers` were taken."""
        return AlgorithmState(
            kl=replace(self.kl, coefficient=numbers["kl_coef"]),
            scores=RunningMoments(numbers["scores_count"], numbers["scores_mean"], numbers["scores_squares"]),
            penalty=numbers["penalty"],
        )


def no_state(settings: object) -> AlgorithmState:
    """For algorithms that remember nothing."""
    return AlgorithmState()


def policy_state(settings: PolicyGradient) -> AlgorithmState:
    """Where an algorithm that samples starts. Raises ConfigError for an adaptive controller that could not move."""
    return AlgorithmState(kl=kl_controller(settings))


def ppo_state(settings: PPO) -> AlgorithmState:
    """Where PPO starts; raises like `policy_state`."""
    return replace(policy_state(settings), penalty=settings.penalty_coef)


def policy_settings_now(settings: PolicyGradient, state: AlgorithmState) -> PolicyGradient:
    """The settings with the state's coefficients in them: what the losses of this step should be given."""
    return replace(settings, kl_coef=state.kl.coefficient)


def ppo_settings_now(settings: PPO, state: AlgorithmState) -> PPO:
    """The same for PPO, whose penalty moves too."""
    return replace(settings, kl_coef=state.kl.coefficient, penalty_coef=state.penalty)


def with_observed_kl(state: AlgorithmState, kl: float, num_episodes: int) -> AlgorithmState:
    """The state after a step of `num_episodes` sequences (of all ranks) whose mean summed KL was `kl` nats."""
    return replace(state, kl=state.kl.update(kl, num_episodes))


def with_seen_scores(state: AlgorithmState, scores: Tensor, shard: Shard = WHOLE) -> AlgorithmState:
    """The state after a batch with these scores, and those of the other shards."""
    return replace(state, scores=state.scores.seen(scores, shard))


def after_ppo_step(state: AlgorithmState, settings: PPO, metrics: Mapping[str, float]) -> AlgorithmState:
    """PPO-KL's beta after a step with d = policy/approxkl_avg over its updates (Schulman et al., 2017, section 4).

    beta doubles when d > 1.5 target and halves when d < target / 1.5. Other losses leave it alone. The paper measures d
    after the last update; the mean over the updates is smaller, and is what `penalty_target` is about.
    """
    if settings.policy_loss != "penalty" or "policy/approxkl_avg" not in metrics:
        return state
    kl, target = metrics["policy/approxkl_avg"], settings.penalty_target
    if kl > _PENALTY_BAND * target:
        return replace(state, penalty=state.penalty * _PENALTY_FACTOR)
    return replace(state, penalty=state.penalty / _PENALTY_FACTOR) if kl < target / _PENALTY_BAND else state
