"""Claims about what a response earns."""

import pytest
import torch

from megarlhf.algorithms.moments import whiten
from megarlhf.algorithms.shaping import (
    at_last_valid,
    earnings,
    last_valid,
    normalised_scores,
    overlong_penalty,
    shaped_reward,
    token_rewards,
)
from megarlhf.algorithms.state import AlgorithmState, policy_state
from megarlhf.config.algorithms import GRPO, PPO
from tests.algorithms.batches import bools, close, experience_of, floats


def test_the_last_valid_position_is_found_for_both_padding_sides():
    values = floats([0.1, 0.2, 0.3, 0.4, 0.5]).repeat(3, 1)
    mask = bools([1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0])
    assert last_valid(mask).tolist() == [2, 4, -1]
    close(at_last_valid(values, mask), [0.3, 0.5, 0])


def test_the_score_lands_on_the_last_sampled_token():
    kl = floats([0.1, 0.2, -0.1, 0, 0.3], [0.5, 0.1, 9, 9, 9])
    mask = bools([1, 1, 1, 1, 1], [1, 1, 0, 0, 0])
    found = token_rewards(-0.1 * kl, torch.tensor([0.8, -0.5]), mask)
    close(found, [[-0.01, -0.02, 0.01, 0, 0.77], [-0.05, -0.51, 0, 0, 0]])
    without_kl = token_rewards(-0.0 * kl, torch.tensor([0.8, -0.5]), mask)
    close(without_kl.sum(dim=1), [0.8, -0.5])


def test_an_empty_response_is_paid_nowhere():
    assert token_rewards(floats([1, 1, 1]), torch.tensor([10.0]), bools([0, 0, 0])).tolist() == [[0, 0, 0]]


def test_scores_of_any_type_are_shaped_in_float32():
    finished = torch.ones(4, dtype=torch.bool)
    for score in (torch.tensor([1, 0, 1, 0]), torch.tensor([True, False, True, False])):
        reward = shaped_reward(score, finished, torch.ones(4), PPO())
        assert reward.dtype == torch.float32 and reward.tolist() == [1, 0, 1, 0]
    close_scores = torch.tensor([1, 1, 1, 1.0078125], dtype=torch.bfloat16)
    reward = shaped_reward(close_scores, finished, torch.ones(4), PPO())
    close(whiten(reward[None], finished[None]), [[-0.5, -0.5, -0.5, 1.5]], 1e-3)


def test_scores_are_clipped_before_the_missing_end_is_punished():
    settings_ = PPO(reward_clip=2.0, missing_eos_penalty=1.5)
    finished = torch.tensor([True, False, False, True])
    found = shaped_reward(torch.tensor([5.0, 5.0, -1.0, -9.0]), finished, torch.ones(4), settings_)
    assert found.tolist() == [2.0, 0.5, -2.5, -2.0]


def test_the_over_long_penalty_rises_over_the_buffer():
    settings = GRPO(overlong_length=10, overlong_buffer=4)
    lengths = torch.tensor([5, 6, 7, 8, 10, 11])
    close(overlong_penalty(lengths, settings), [0, 0, -0.25, -0.5, -1, -1])
    close(
        overlong_penalty(lengths, GRPO(overlong_length=10, overlong_buffer=4, overlong_penalty=0.5))[2:4],
        [-0.125, -0.25],
    )
    close(overlong_penalty(lengths, GRPO(overlong_length=10)), [0, 0, 0, 0, 0, -1])
    close(overlong_penalty(lengths, GRPO()), [0] * 6)


def test_the_length_that_is_punished_is_that_of_the_sampled_tokens():
    """Rows of 3, 2 and 3 positions, of which 3, 2 and 1 were sampled."""
    batch = experience_of(bools([1, 1, 1], [1, 1, 0], [1, 0, 0]))
    for settings in (GRPO(overlong_length=2, overlong_buffer=1), PPO(overlong_length=2, overlong_buffer=1)):
        assert earnings(batch, settings, policy_state(settings)).reward.tolist() == [-1, -1, 0]


def test_scores_are_normalised_by_all_scores_so_far():
    settings = PPO(normalise_scores="standardise")
    sampled, state = torch.ones(2, dtype=torch.bool), AlgorithmState()
    first, state = normalised_scores(torch.tensor([1.0, 3.0]), sampled, settings, state)
    close(first, [-(0.5**0.5), 0.5**0.5])
    second, state = normalised_scores(torch.tensor([5.0, 7.0]), sampled, settings, state)
    everything = torch.tensor([1.0, 3.0, 5.0, 7.0])
    close(second, (torch.tensor([5.0, 7.0]) - everything.mean()) / everything.std())
    scaled, _ = normalised_scores(torch.tensor([5.0, 7.0]), sampled, PPO(normalise_scores="scale"), state)
    assert scaled.dtype == torch.float32 and bool((scaled > 0).all())


def test_a_row_without_a_sampled_token_does_not_move_the_moments():
    settings = PPO(normalise_scores="standardise")
    batch = experience_of(bools([1], [1], [0]), score=torch.tensor([1.0, 3.0, 1000.0]))
    earned = earnings(batch, settings, AlgorithmState())
    assert earned.state.scores.mean == 2.0 and earned.state.scores.count == 2
    assert earned.metrics["objective/score_deviation"] == pytest.approx(2**0.5)


def test_equal_scores_normalise_to_0():
    for dtype in (torch.float16, torch.float32):
        settings, score = PPO(normalise_scores="standardise"), torch.full((7,), 0.1, dtype=dtype)
        found, _ = normalised_scores(score, torch.ones(7, dtype=torch.bool), settings, AlgorithmState())
        assert not found.any()


def test_a_penalty_in_the_loss_leaves_the_reward_alone_and_is_still_measured():
    batch = experience_of(bools([1, 1]), logp_start=floats([1, 2]), score=torch.tensor([3.0]))
    settings = GRPO(kl_in="loss", kl_estimator="k1", kl_coef=0.5)
    earned = earnings(batch, settings, policy_state(settings))
    assert not earned.penalty.any() and earned.metrics["objective/kl"] == 3.0
    assert earned.metrics["objective/rlhf_reward"] == 3.0 and earned.metrics["objective/non_score_reward"] == 0.0


def test_without_a_reference_there_is_no_kl_to_report():
    batch = experience_of(bools([1, 1])).replace(logp_reference=None)
    earned = earnings(batch, GRPO(kl_coef=0.0), AlgorithmState())
    assert not earned.penalty.any() and "objective/kl" not in earned.metrics


def test_groups_that_teach_nothing_are_counted():
    mask = bools(*[[1]] * 5)
    batch = experience_of(mask, group=torch.tensor([7, 7, 3, 3, 9]), score=torch.tensor([0.1, 0.1, 1.0, 0.0, 5.0]))
    assert earnings(batch, GRPO(), AlgorithmState()).metrics["objective/groups_without_signal"] == 0.5
    alone = experience_of(mask, score=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert "objective/groups_without_signal" not in earnings(alone, GRPO(), AlgorithmState()).metrics
