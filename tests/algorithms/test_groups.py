"""Claims about advantages relative to siblings, with numbers by hand and by slow loops."""

import statistics

import pytest
import torch

from megarlhf.algorithms.groups import centred, group_relative, has_signal, leave_one_out
from tests.algorithms.batches import close


def one_group(values, dtype=torch.float32):
    values = torch.tensor(values, dtype=dtype)
    return values, torch.zeros(len(values), dtype=torch.int64), torch.ones(len(values), dtype=torch.bool)


def test_each_estimator_of_one_right_answer_in_four():
    group = one_group([1, 0, 0, 0])
    close(group_relative(*group, "unbiased"), [1.5, -0.5, -0.5, -0.5])
    close(group_relative(*group, "biased"), [1.73205, -0.57735, -0.57735, -0.57735])
    close(group_relative(*group, "none"), [0.75, -0.25, -0.25, -0.25])
    close(leave_one_out(*group), [1, -1 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("values", [[0.95] * 8, [0.1] * 7, [0.1] * 4, [1e4 + 0.1] * 3])
def test_equal_rewards_give_exactly_0(values, dtype):
    group = one_group(values, dtype)
    for std in ("unbiased", "biased", "none"):
        assert not group_relative(*group, std).any()
    for divide in (False, True):
        assert not leave_one_out(*group, divide_by_peer_std=divide).any()
    assert not has_signal(*group).any()


def test_a_peer_deviation_of_0_keeps_the_advantage_at_its_scale():
    found = leave_one_out(*one_group([0.0] + [0.95] * 7), divide_by_peer_std=True)
    assert float(found[0]) == pytest.approx(-0.95) and float(found.abs().max()) < 3
    close(leave_one_out(*one_group([1.0, 0.0]), divide_by_peer_std=True), [1, -1])
    found = leave_one_out(*one_group([1000.3] + [0.7] * 7), divide_by_peer_std=True)
    assert float(found[0]) == pytest.approx(999.6)


def test_many_rows_are_no_square_of_them():
    """A number for each two of these rows would be 80 GB."""
    values, group = torch.randn(100_000), torch.arange(100_000) // 4
    found = leave_one_out(values, group, torch.ones(100_000, dtype=torch.bool), divide_by_peer_std=True)
    a, *others = values[:4].tolist()
    assert float(found[0]) == pytest.approx((a - statistics.mean(others)) / statistics.stdev(others), rel=1e-4)


def test_a_left_over_singleton_gets_0():
    for function in (lambda *of: group_relative(*of, "unbiased"), leave_one_out, centred):
        assert function(*one_group([5.0])).tolist() == [0.0]


def test_an_empty_response_takes_no_part():
    values, group, valid = one_group([10.0, 10.0, 1.0])
    valid[0] = False
    close(leave_one_out(values, group, valid), [0, 9, -9])
    close(group_relative(values, group, valid, "none"), [0, 4.5, -4.5])
    valid[1] = False
    assert not leave_one_out(values, group, valid).any() and not has_signal(values, group, valid).any()


def random_groups():
    """11 rows of groups of 1, 2, 3 and 5, in no order."""
    generator = torch.Generator().manual_seed(0)
    group = torch.tensor([7, 7, 3, 3, 3, 9, 4, 4, 4, 4, 4])[torch.randperm(11, generator=generator)]
    return torch.randn(11, generator=generator), group, torch.ones(11, dtype=torch.bool)


def test_they_equal_slow_loops():
    values, group, valid = random_groups()
    for row in range(11):
        siblings = [float(values[j]) for j in range(11) if group[j] == group[row]]
        peers = [float(values[j]) for j in range(11) if group[j] == group[row] and j != row]
        distance = float(values[row]) - sum(siblings) / len(siblings)
        spread = statistics.stdev(siblings) if len(siblings) > 1 else 0.0
        alone = float(values[row]) - sum(peers) / len(peers) if peers else 0.0
        around = statistics.stdev(peers) if len(peers) > 1 else 1.0
        assert float(group_relative(values, group, valid, "none")[row]) == pytest.approx(distance, abs=1e-6)
        found = float(group_relative(values, group, valid, "unbiased")[row])
        assert found == pytest.approx(distance / (spread + 1e-6), abs=1e-5)
        found = float(group_relative(values, group, valid, "biased")[row])
        assert found == pytest.approx(distance / (statistics.pstdev(siblings) + 1e-6), abs=1e-5)
        assert float(leave_one_out(values, group, valid)[row]) == pytest.approx(alone, abs=1e-6)
        found = float(leave_one_out(values, group, valid, divide_by_peer_std=True)[row])
        assert found == pytest.approx(alone / around, rel=1e-5)


def test_rows_are_matched_by_group_and_not_by_position():
    values, group, valid = random_groups()
    order = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    for function in (leave_one_out, lambda *of: group_relative(*of, "biased")):
        close(function(values[order], group[order], valid[order]), function(values, group, valid)[order], 1e-6)
    assert torch.equal(has_signal(values[order], group[order], valid[order]), has_signal(values, group, valid)[order])


def test_rewards_in_half_precision_are_promoted_first():
    close(group_relative(*one_group([1, 1, 1, 1.0078125], torch.bfloat16), "unbiased"), [-0.5, -0.5, -0.5, 1.5], 1e-3)


def test_a_group_has_signal_when_one_reward_differs():
    values = torch.tensor([1.0, 1.0, 0.0, 0.1, 0.1])
    group, valid = torch.tensor([2, 2, 2, 5, 5]), torch.ones(5, dtype=torch.bool)
    assert has_signal(values, group, valid).tolist() == [True, True, True, False, False]


def test_no_rows_have_no_advantages():
    nothing = torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
    assert leave_one_out(*nothing).shape == group_relative(*nothing, "unbiased").shape == (0,)
