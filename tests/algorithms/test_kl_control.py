"""Claims about the KL controllers."""

import dataclasses

import pytest

from megarlhf.algorithms.kl_control import AdaptiveKL, FixedKL, kl_controller
from megarlhf.config.settings import PPO
from megarlhf.errors import ConfigError


def test_the_adaptive_coefficient_moves_towards_its_target():
    start = AdaptiveKL(coefficient=0.1, target=6.0, horizon=10000)
    assert abs(start.update(kl=9.0, num_episodes=256).coefficient - 0.100512) < 1e-9
    assert abs(start.update(kl=3.0, num_episodes=256).coefficient - 0.099488) < 1e-9
    assert start.update(kl=6.0, num_episodes=256).coefficient == 0.1
    inside = start.update(kl=6.6, num_episodes=1000).coefficient
    assert abs(inside - 0.1 * (1 + 0.1 * 1000 / 10000)) < 1e-12


def test_an_update_leaves_the_old_value_alone():
    start = AdaptiveKL(0.1, 6.0, 10000)
    start.update(9.0, 256)
    assert start.coefficient == 0.1
    with pytest.raises(dataclasses.FrozenInstanceError):
        start.coefficient = 0.2


def test_the_fixed_coefficient_stays():
    assert FixedKL(0.05).update(100.0, 256) == FixedKL(0.05)


def test_settings_choose_the_controller():
    assert kl_controller(PPO(kl_coef=0.03)) == FixedKL(0.03)
    assert kl_controller(PPO(kl_controller="adaptive")) == AdaptiveKL(0.05, 6.0, 10000)


def test_a_target_or_horizon_of_0_is_refused_with_all_violations():
    with pytest.raises(ConfigError, match="kl_target: 0.*above 0") as caught:
        kl_controller(PPO(kl_controller="adaptive", kl_target=0.0, kl_horizon=0))
    assert len(caught.value.violations) == 2
