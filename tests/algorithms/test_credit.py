"""Claims about credit assignment, with numbers worked out by hand or by a slow loop."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarlhf.algorithms.credit import (
    gae,
    grpo_credit,
    minibatch_advantages,
    policy_reads,
    ppo_credit,
    reinforce_plus_plus_credit,
    returns_to_go,
    rloo_credit,
)
from megarlhf.algorithms.groups import group_relative, leave_one_out
from megarlhf.algorithms.kl_control import FixedKL
from megarlhf.algorithms.moments import whiten
from megarlhf.algorithms.state import AlgorithmState, ppo_state
from megarlhf.config.algorithms import GRPO, PPO, RLOO, ReinforcePlusPlus
from tests.algorithms.batches import bools, close, experience_of, floats

REWARD = floats([0, 0, 0, 0, 1], [0, 0, -0.5, 0, 0])
VALUE = floats([0.1, 0.2, 0.3, 0.4, 0.5], [0.5, 0.4, 0.3, 7, -7])
MASK = bools([1, 1, 1, 1, 1], [1, 1, 1, 0, 0])
ADVANTAGE = floats([0.314536, 0.325744, 0.3552, 0.41, 0.5], [-0.64832, -0.706, -0.8, 0, 0])
TARGET = floats([0.414536, 0.525744, 0.6552, 0.81, 1], [-0.14832, -0.306, -0.5, 0, 0])


def at(kl_coef: float) -> AlgorithmState:
    return AlgorithmState(kl=FixedKL(kl_coef))


def test_gae_of_the_reference_batch():
    advantage, target = gae(REWARD, VALUE, MASK, gamma=0.9, lambda_=0.8)
    close(advantage, ADVANTAGE)
    close(target, TARGET)
    assert advantage.dtype == target.dtype == torch.float32


def test_gae_never_bootstraps_from_a_masked_value():
    advantage, target = gae(floats([0, 1, 0]), floats([0, 0, 100]), bools([1, 1, 0]), gamma=1.0, lambda_=0.95)
    close(advantage, [[0.95, 1, 0]])
    close(target, [[0.95, 1, 0]])


def test_gae_steps_over_a_hole_in_the_mask():
    advantage, target = gae(floats([0, 0, 1]), floats([0.5, 9, 0.25]), bools([1, 0, 1]), gamma=1.0, lambda_=1.0)
    close(advantage, [[0.5, 0, 0.75]])
    close(target, [[1, 0, 1]])


def test_gae_ignores_sentinels_at_masked_positions():
    nan, inf = float("nan"), float("inf")
    advantage, target = gae(floats([nan, 0, inf]), floats([inf, 0.5, nan]), bools([0, 1, 0]), gamma=1.0, lambda_=0.95)
    close(advantage, [[0, -0.5, 0]])
    close(target, [[0, 0, 0]])


numbers = st.floats(-5, 5, width=32)


@st.composite
def rows(draw):
    num_rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 6))

    def table(element):
        return [draw(st.lists(element, min_size=width, max_size=width)) for _ in range(num_rows)]

    return floats(*table(numbers)), floats(*table(numbers)), bools(*table(st.integers(0, 1)))


@settings(deadline=None, max_examples=150)
@given(rows(), st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_the_sum_over_later_errors(batch, gamma, lambda_):
    """Equation 16 taken literally: every advantage is a sum over the later valid positions of its row."""
    reward, value, mask = batch
    advantage, target = gae(reward, value, mask, gamma, lambda_)
    for b in range(mask.shape[0]):
        valid = [t for t in range(mask.shape[1]) if mask[b, t]]
        values = [float(value[b, t]) for t in valid] + [0.0]
        errors = [float(reward[b, t]) + gamma * values[i + 1] - values[i] for i, t in enumerate(valid)]
        for i, t in enumerate(valid):
            expected = sum((gamma * lambda_) ** k * error for k, error in enumerate(errors[i:]))
            assert abs(float(advantage[b, t]) - expected) < 1e-4
            assert abs(float(target[b, t]) - expected - values[i]) < 1e-4
    assert not advantage[~mask].any() and not target[~mask].any()


def test_an_empty_response_leaves_its_peers_alone_and_is_only_logged():
    mask = bools([0, 0, 0], [1, 1, 0])
    empty_row = experience_of(mask, score=torch.tensor([10.0, 1.0]), logp_start=torch.full((2, 3), 0.25))
    both, _, metrics = ppo_credit(empty_row, PPO(), at(0.1))
    alone, _, alone_metrics = ppo_credit(empty_row.select([1]), PPO(), at(0.1))
    assert torch.equal(both.advantage[1:], alone.advantage) and not both.advantage[0].any()
    assert metrics["objective/scores"] == 5.5
    assert metrics["objective/kl"] == alone_metrics["objective/kl"] == 0.5
    assert metrics["objective/rlhf_reward"] == alone_metrics["objective/rlhf_reward"]
    assert metrics["objective/rlhf_reward"] == pytest.approx(1.0 - 0.1 * 0.5)
    _, _, nothing = ppo_credit(empty_row.select([0]), PPO(), at(0.1))
    assert nothing == {"objective/kl_coef": 0.1, "objective/scores": 10.0, "val/num_eos_tokens": 1.0}


def random_batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = bools([0, 0, 1, 1, 1, 0], [0, 1, 1, 0, 1, 1], [1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0])

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    return experience_of(
        mask,
        logp_start=noise(4, 6),
        logp_rollout=noise(4, 6),
        logp_reference=noise(4, 6),
        value=noise(4, 6),
        score=noise(4),
        finished=torch.tensor([True, False, True, True]),
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_ppo_credit_equals_a_slow_loop(estimator):
    batch = random_batch()
    settings_ = PPO(
        kl_estimator=estimator,
        gamma=0.99,
        lambda_=0.9,
        missing_eos_penalty=0.5,
        reward_clip=1.0,
        whiten_advantages="none",
    )
    filled, _, metrics = ppo_credit(batch, settings_, at(0.3))
    kl_sums, returns, gap = [], [], 0.0
    for b in range(4):
        valid = [t for t in range(6) if batch.mask[b, t]]
        d = [float(batch.logp_start[b, t] - batch.logp_reference[b, t]) for t in valid]
        formula = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: 2.718281828459045**-x - 1 + x}
        kl = [formula[estimator](x) for x in d]
        gap = max([gap, *[abs(float(batch.logp_rollout[b, t] - batch.logp_start[b, t])) for t in valid]])
        reward = min(max(float(batch.score[b]), -1.0), 1.0) - (0.0 if batch.finished[b] else 0.5)
        paid = [-0.3 * x for x in kl]
        paid[-1] += reward
        following, next_value = 0.0, 0.0
        for i in reversed(range(len(valid))):
            value = float(batch.value[b, valid[i]])
            following = paid[i] + 0.99 * next_value - value + 0.99 * 0.9 * following
            next_value = value
            assert abs(float(filled.advantage[b, valid[i]]) - following) < 1e-5
            assert abs(float(filled.target[b, valid[i]]) - following - value) < 1e-5
        kl_sums.append(sum(kl))
        returns.append(sum(paid))
    assert abs(metrics["objective/kl"] - sum(kl_sums) / 4) < 1e-5
    assert abs(metrics["objective/non_score_reward"] + 0.3 * sum(kl_sums) / 4) < 1e-5
    assert abs(metrics["objective/rlhf_reward"] - sum(returns) / 4) < 1e-5
    assert abs(metrics["objective/scores"] - float(batch.score.mean())) < 1e-6
    assert abs(metrics["rollout/logp_gap_max"] - gap) < 1e-6
    assert metrics["val/num_eos_tokens"] == 3.0


def test_targets_do_not_change_when_advantages_are_whitened():
    batch = random_batch()
    raw, _, _ = ppo_credit(batch, PPO(whiten_advantages="none"), at(0.05))
    white, _, _ = ppo_credit(batch, PPO(whiten_advantages="batch"), at(0.05))
    assert torch.equal(raw.target, white.target)
    assert torch.equal(white.advantage, whiten(raw.advantage, batch.mask))
    close(raw.target, torch.where(batch.mask, raw.advantage + batch.value, 0.0), 1e-6)


def test_minibatch_whitening_uses_the_minibatch_alone():
    settings_ = PPO(whiten_advantages="minibatch")
    filled, _, _ = ppo_credit(random_batch(), settings_, at(0.05))
    part = minibatch_advantages(filled.select([1, 3]), settings_)
    valid = part.advantage[part.mask]
    assert abs(float(valid.mean())) < 1e-6 and abs(float(valid.var()) - 1.0) < 1e-5
    for kind in ("batch", "none"):
        assert minibatch_advantages(filled, PPO(whiten_advantages=kind)) is filled


def test_reward_whitening_scales_what_gae_sees_and_not_what_is_reported():
    batch = random_batch()
    plain, _, reported = ppo_credit(batch, PPO(), at(0.05))
    scaled, _, again = ppo_credit(batch, PPO(whiten_rewards=True), at(0.05))
    assert reported.pop("val/explained_variance") != again.pop("val/explained_variance"), "the targets are others"
    assert reported == again and torch.equal(plain.reward, scaled.reward)
    close(scaled.token_reward, whiten(plain.token_reward, batch.mask, keep_mean=True))


def test_credit_follows_its_rows_in_any_order():
    batch = random_batch()
    order = [2, 0, 3, 1]
    filled, _, metrics = ppo_credit(batch, PPO(), at(0.05))
    permuted, _, permuted_metrics = ppo_credit(batch.select(order), PPO(), at(0.05))
    close(permuted.advantage, filled.select(order).advantage, 1e-6)
    assert metrics.keys() == permuted_metrics.keys()


def test_the_penalty_lowers_the_reward_where_the_policy_is_likelier_than_the_reference():
    batch = experience_of(bools([1, 1]), logp_start=floats([-1.0, -1.0]), logp_reference=floats([-2.0, -0.5]))
    filled, _, _ = ppo_credit(batch, PPO(), at(0.1))
    close(filled.token_reward, [[-0.1, 0.05]])


def test_what_lies_behind_the_mask_changes_nothing():
    """Sentinels such as log-prob 1 at padding, or NaN, reach neither advantages nor metrics."""
    batch = random_batch()
    clean, _, clean_metrics = ppo_credit(batch, PPO(), at(0.05))
    for sentinel in (1.0, float("nan"), -1e9):
        names = ("logp_start", "logp_rollout", "logp_reference", "value")
        dirty = {name: torch.where(batch.mask, batch.__dict__[name], sentinel) for name in names}
        filled, _, metrics = ppo_credit(dataclasses.replace(batch, **dirty), PPO(), at(0.05))
        assert metrics == clean_metrics
        assert torch.equal(filled.advantage, clean.advantage) and torch.equal(filled.target, clean.target)


def test_credit_asks_for_the_stages_it_needs():
    with pytest.raises(AssertionError, match="value .filled by the critic"):
        ppo_credit(random_batch().replace(value=None), PPO(), at(0.05))


def test_the_kl_coefficient_moves_for_the_next_step_by_the_kl_of_all_rows():
    batch = experience_of(bools([1, 1], [1, 0]), logp_start=floats([1, 2], [3, 0]))
    settings_ = PPO(kl_coef=0.1, kl_controller="adaptive", kl_target=2.0, kl_horizon=20)
    _, state, metrics = ppo_credit(batch, settings_, ppo_state(settings_))
    assert metrics["objective/kl"] == 3.0 and metrics["objective/kl_coef"] == 0.1
    assert abs(state.kl.coefficient - 0.1 * (1 + 0.2 * 2 / 20)) < 1e-12


def grouped_batch():
    """Two prompts of two responses; KL sums (k1) 1, 0, 2 and 3."""
    mask = bools([1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1])
    return experience_of(
        mask,
        group=torch.tensor([4, 4, 9, 9]),
        score=torch.tensor([1.0, 0.0, 5.0, 2.0]),
        logp_start=floats([0.5, 0.5, 7], [0, 7, 7], [1, 0, 1], [7, 1, 2]),
    )


def test_grpo_gives_every_token_its_responses_relative_reward():
    batch, settings_ = grouped_batch(), GRPO(group_std="biased")
    filled, state, metrics = grpo_credit(batch, settings_, at(0.1))
    relative = torch.tensor([1.0, -1.0, 1.0, -1.0])
    close(filled.advantage, torch.where(batch.mask, relative[:, None], 0.0))
    assert filled.target is None and filled.reward.tolist() == [1, 0, 5, 2]
    assert metrics["objective/non_score_reward"] == 0.0 and state.kl.coefficient == 0.1


def test_rloo_takes_the_kl_of_the_response_off_before_the_baseline():
    batch = grouped_batch()
    filled, _, metrics = rloo_credit(batch, RLOO(), at(0.1))
    total = torch.tensor([1.0 - 0.1, 0.0, 5.0 - 0.2, 2.0 - 0.3])
    expected = leave_one_out(total, batch.group, batch.mask.any(1))
    close(expected, [0.9, -0.9, 3.1, -3.1])
    close(filled.advantage, torch.where(batch.mask, expected[:, None], 0.0))
    assert metrics["objective/non_score_reward"] == pytest.approx(-0.15)


def test_reinforce_plus_plus_whitens_returns_to_go_over_the_batch():
    batch = grouped_batch()
    filled, _, _ = reinforce_plus_plus_credit(batch, ReinforcePlusPlus(whiten_advantages="none"), at(0.1))
    expected = floats([0.9, 0.95, 0], [0, 0, 0], [4.8, 4.9, 4.9], [0, 1.7, 1.8])
    close(filled.advantage, expected)
    white, _, _ = reinforce_plus_plus_credit(batch, ReinforcePlusPlus(), at(0.1))
    close(white.advantage, whiten(expected, batch.mask))
    baseline = ReinforcePlusPlus(baseline=True, whiten_advantages="none")
    relative, _, _ = reinforce_plus_plus_credit(batch, baseline, at(0.0))
    close(relative.advantage, torch.where(batch.mask, torch.tensor([0.5, -0.5, 1.5, -1.5])[:, None], 0.0))
    assert relative.reward.tolist() == [1, 0, 5, 2]


def test_returns_to_go_discount_per_valid_token():
    close(returns_to_go(floats([1, 9, 2, 4]), bools([1, 0, 1, 1]), 0.5), [[1 + 1 + 1, 0, 4, 4]])


@pytest.mark.parametrize(
    ("credit", "settings_"),
    [(grpo_credit, GRPO()), (rloo_credit, RLOO()), (reinforce_plus_plus_credit, ReinforcePlusPlus(baseline=True))],
)
def test_group_credit_follows_its_rows_in_any_order(credit, settings_):
    batch, order = grouped_batch(), [2, 0, 3, 1]
    close(
        credit(batch.select(order), settings_, at(0.1))[0].advantage,
        credit(batch, settings_, at(0.1))[0].advantage[order],
    )


@pytest.mark.parametrize("credit", [grpo_credit, rloo_credit])
def test_groups_of_equal_rewards_teach_exactly_nothing(credit):
    batch = grouped_batch().replace(score=torch.tensor([0.1, 0.1, 0.95, 0.95]))
    settings_ = GRPO() if credit is grpo_credit else RLOO(kl_in="loss", divide_by_peer_std=True)
    filled, _, metrics = credit(batch, settings_, at(0.1))
    assert not filled.advantage.any() and metrics["objective/groups_without_signal"] == 1.0


def test_the_reference_is_read_only_where_something_is_made_of_it():
    assert "logp_reference" in policy_reads(GRPO()) and "logp_reference" not in policy_reads(GRPO(kl_coef=0.0))
    filled, _, _ = grpo_credit(grouped_batch().replace(logp_reference=None), GRPO(kl_coef=0.0), at(0.0))
    assert filled.advantage.any()
    assert group_relative(filled.reward, filled.group, filled.mask.any(1), "none").any()


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant():
    batch = random_batch()
    target = ppo_credit(batch, PPO(lambda_=1.0), at(0.0))[0].target  # with lambda 1 targets do not depend on the values
    for value, expected in ((target, 1.0), (torch.where(batch.mask, 0.3, 0.0), 0.0), (2 * target, 0.0)):
        found = ppo_credit(batch.replace(value=value), PPO(lambda_=1.0), at(0.0))[2]["val/explained_variance"]
        assert abs(found - expected) < 1e-5


def gae_over_columns(reward, value, mask, gamma, lambda_):
    """Position by position, over all rows and positions at once."""
    advantage, following = torch.zeros_like(reward), torch.zeros(len(reward))
    next_value = torch.zeros(len(reward))
    for t in reversed(range(reward.shape[1])):
        delta = reward[:, t] + gamma * next_value - value[:, t]
        following = torch.where(mask[:, t], delta + gamma * lambda_ * following, following)
        next_value = torch.where(mask[:, t], value[:, t], next_value)
        advantage[:, t] = torch.where(mask[:, t], following, 0.0)
    return advantage, torch.where(mask, advantage + value, 0.0)


@pytest.mark.parametrize("num_rows", [0, 1, 4097])
def test_many_rows_are_credited_to_the_bit_as_all_at_once(num_rows):
    """More rows than are gone through together; holes in the mask, rows without a token, columns without one."""
    generator = torch.Generator().manual_seed(0)
    reward, value = torch.randn(2, num_rows, 9, generator=generator)
    mask = torch.rand(num_rows, 9, generator=generator) < 0.6
    mask[:, :2] = mask[:, 8:] = mask[::5] = False
    found, expected = (way(reward, value, mask, 0.99, 0.95) for way in (gae, gae_over_columns))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
