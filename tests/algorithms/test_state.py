"""Claims about what an algorithm remembers."""

import json

import pytest
import torch

from megarlhf.algorithms.catalogue import ALGORITHMS
from megarlhf.algorithms.kl_control import AdaptiveKL
from megarlhf.algorithms.moments import RunningMoments
from megarlhf.algorithms.state import AlgorithmState, ppo_settings_now, ppo_state, with_observed_kl, with_seen_scores
from megarlhf.config.algorithms import PPO

ADAPTIVE = PPO(kl_coef=0.1, kl_controller="adaptive", kl_target=6.0, kl_horizon=10000, penalty_coef=2.0)


def test_a_state_survives_json_and_goes_on_as_if_nothing_had_happened():
    state = with_seen_scores(with_observed_kl(ppo_state(ADAPTIVE), 9.0, 256), torch.tensor([1.0, 2.5, -3.0]))
    restored = ppo_state(ADAPTIVE).restored(json.loads(json.dumps(state.numbers())))
    assert restored == state
    assert with_observed_kl(restored, 3.0, 256) == with_observed_kl(state, 3.0, 256)


def test_the_losses_are_given_the_coefficients_of_the_step():
    state = AlgorithmState(AdaptiveKL(0.3, 6.0, 10), RunningMoments(), penalty=0.7)
    now = ppo_settings_now(ADAPTIVE, state)
    assert (now.kl_coef, now.penalty_coef, now.clip_low) == (0.3, 0.7, ADAPTIVE.clip_low)


def test_the_kl_of_all_ranks_moves_the_coefficient():
    """256 episodes at once, as two data-parallel ranks of 128 make them together."""
    state = with_observed_kl(ppo_state(ADAPTIVE), kl=9.0, num_episodes=256)
    assert state.kl.coefficient == pytest.approx(0.100512, abs=1e-9)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_starts_from_its_default_settings(name):
    algorithm = ALGORITHMS[name]
    settings = algorithm.settings()
    state = algorithm.initial_state(settings)
    assert state == algorithm.after_step(state, settings, {})
    assert algorithm.settings_now(settings, state) == settings
