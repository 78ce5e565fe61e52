"""Claims about what the `algorithm` section may hold."""

from dataclasses import replace

import pytest

from megarlhf.algorithms.kl_control import kl_controller
from megarlhf.config.algorithm_check import algorithm_violations, algorithm_warnings, horizon_violations
from megarlhf.config.algorithms import DPO, GRPO, KTO, PPO, RLOO, SFT, ReinforcePlusPlus, RewardModelling


@pytest.mark.parametrize(
    "settings", [PPO(), GRPO(), RLOO(), ReinforcePlusPlus(), DPO(), KTO(), SFT(), RewardModelling()]
)
def test_every_default_is_right_and_draws_no_warning(settings):
    assert algorithm_violations(settings, samples_per_prompt=4) == []
    assert algorithm_warnings(settings) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (PPO(kl_coef=-1.0), "algorithm.kl_coef: -1.0 is out of range; choose a value that is 0 or more"),
        (PPO(lambda_=1.5), "algorithm.lambda: 1.5 is out of range"),
        (PPO(dual_clip=0.5), "algorithm.dual_clip: 0.5 is out of range; choose a value that is more than 1, or 0"),
        (PPO(kl_controller="adaptive", kl_target=0.0), "algorithm.kl_target: 0.0"),
        (PPO(kl_controller="adaptive", kl_horizon=0), "algorithm.kl_horizon: 0"),
        (PPO(kl_controller="adaptive", kl_coef=0.0), "algorithm.kl_coef: 0 cannot be adapted"),
        (GRPO(loss_mean="fixed_length"), "algorithm.loss_length: 0 with loss_mean fixed_length"),
        (GRPO(overlong_length=4, overlong_buffer=5), "algorithm.overlong_buffer: 5 tokens do not fit"),
        (PPO(policy_loss="penalty", num_epochs=1), "algorithm.policy_loss: penalty acts between the updates"),
        (PPO(policy_loss="penalty", dual_clip=3.0), "algorithm.dual_clip: 3.0 bounds a loss that is clipped"),
        (DPO(beta=0.0), "algorithm.beta: 0.0 is out of range"),
        (DPO(label_smoothing=0.5), "algorithm.label_smoothing: 0.5 is out of range"),
        (DPO(loss="ipo", label_smoothing=0.1), "algorithm.label_smoothing: 0.1 is for loss sigmoid"),
        (KTO(desirable_weight=-1.0), "algorithm.desirable_weight: -1.0"),
        (RewardModelling(centring_coef=-0.1), "algorithm.centring_coef: -0.1"),
        (RewardModelling("regression", label_smoothing=0.1), "algorithm.label_smoothing: 0.1 is about compared"),
        (RewardModelling("regression", margins=True), "algorithm.margins: True is about compared answers"),
        (RewardModelling("regression", centring_coef=0.1), "algorithm.centring_coef: 0.1 is about compared answers"),
    ],
)
def test_what_cannot_be_is_named_with_its_value(settings, words):
    found = algorithm_violations(settings, samples_per_prompt=4)
    assert len(found) == 1 and found[0].startswith(words)


@pytest.mark.parametrize("settings", [GRPO(), RLOO(), ReinforcePlusPlus(baseline=True)])
def test_one_response_has_no_group(settings):
    (found,) = algorithm_violations(settings, samples_per_prompt=1)
    assert found.startswith("rollout.samples_per_prompt: 1 response has no siblings") and "2 or more" in found
    assert algorithm_violations(ReinforcePlusPlus(), samples_per_prompt=1) == []


def test_k1_in_the_loss_draws_a_warning():
    (warning,) = algorithm_warnings(GRPO(kl_estimator="k1"))
    assert "does not pull towards it" in warning
    for settings in (GRPO(kl_estimator="k1", kl_coef=0.0), PPO(kl_estimator="k1"), GRPO(kl_estimator="k2")):
        assert algorithm_warnings(settings) == []


@pytest.mark.parametrize("episodes", [1, 4, 5, 64, 512])
def test_no_step_takes_an_accepted_adaptive_coefficient_to_0(episodes):
    """However small the measured KL is; and the horizon that is suggested is the smallest one."""
    smallest = next(horizon for horizon in range(1, 1000) if 5 * horizon > episodes)
    accepted = PPO(kl_controller="adaptive", kl_horizon=smallest)
    assert not list(horizon_violations(accepted, episodes))
    assert kl_controller(accepted).update(0.0, episodes).coefficient > 0
    for horizon in range(1, smallest):
        (found,) = horizon_violations(replace(accepted, kl_horizon=horizon), episodes)
        assert found.startswith(f"algorithm.kl_horizon: {horizon} ") and f"choose {smallest} or more" in found
    assert not list(horizon_violations(PPO(kl_horizon=1), episodes))
