"""What an algorithm remembers from one step to the next, as a value: it is saved with a checkpoint."""

from dataclasses import dataclass, replace

from megarlhf.algorithms.kl_control import FixedKL, KLController, kl_controller
from megarlhf.config.algorithms import PPO


@dataclass(frozen=True)
class AlgorithmState:
    """The same on every rank: it is computed from the whole batch and from reduced metrics."""

    kl: KLController = FixedKL(0.0)
    """Coefficient of the KL penalty to the reference."""


def no_state(settings: object) -> AlgorithmState:
    """For algorithms that remember nothing."""
    return AlgorithmState()


def ppo_state(settings: PPO) -> AlgorithmState:
    """Where PPO starts."""
    return AlgorithmState(kl=kl_controller(settings))


def with_observed_kl(state: AlgorithmState, kl: float, num_episodes: int) -> AlgorithmState:
    """The state after a step of `num_episodes` sequences (of all ranks) whose mean summed KL was `kl` nats."""
    return replace(state, kl=state.kl.update(kl, num_episodes))
