"""Claims about reward-model losses, by hand and by closed form."""

import math

import pytest
import torch

from megarlhf.algorithms.reward_model import calibration, calibration_error, last_scores, reward_loss, reward_reads
from megarlhf.config.algorithms import RewardModelling
from megarlhf.records import Denominators, Experience, Prediction, TokenBatch, merge_metrics, metric_results
from tests.algorithms.batches import bools, close, experience_of, floats


def answers(mask, preference, group, **fields) -> Experience:
    return experience_of(mask, preference=torch.tensor(preference), group=torch.tensor(group), **fields)


PAIRS = RewardModelling()


def loss_of(value, batch, settings=PAIRS):
    tokens = TokenBatch.from_experience(batch)
    loss, metrics = reward_loss(Prediction(value[batch.mask]), tokens, settings, Denominators.of(batch))
    return loss, metric_results(metrics)


def cost(difference):
    return math.log1p(math.exp(-difference))


def three_pairs() -> tuple[torch.Tensor, Experience]:
    batch = answers(bools(*[[0, 1]] * 6), [1.0, 0.0] * 3, [0, 0, 1, 1, 2, 2])
    return floats([9, 2], [9, 0], [9, 1], [9, 1], [9, -20], [9, 30]), batch


def test_three_pairs_by_their_differences():
    """Differences 2, 0 and -50: no overflow, a tie is half right, and only the marked token is read."""
    value, batch = three_pairs()
    loss, metrics = loss_of(value, batch)
    assert float(loss) == pytest.approx(16.940025, abs=1e-5)
    assert metrics["rewards/accuracy"] == pytest.approx(0.5)
    assert metrics["rewards/margin"] == pytest.approx(-16.0)
    assert metrics["scores/avg"] == pytest.approx(14 / 6)


@pytest.mark.parametrize("difference", [-200.0, 200.0])
def test_extreme_differences_stay_finite(difference):
    batch = answers(bools([1], [1]), [1.0, 0.0], [0, 0])
    value = floats([difference], [0.0]).requires_grad_()
    loss, _ = loss_of(value, batch, RewardModelling(label_smoothing=0.1))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.9 * max(-difference, 0) + 0.1 * max(difference, 0), abs=1e-4)
    assert bool(value.grad.isfinite().all())


def test_margin_and_label_smoothing():
    batch = answers(bools([1], [1]), [1.0, 0.0], [0, 0], margin=torch.tensor([0.7, 0.0]))
    value = floats([1.5], [0.2])
    plain, _ = loss_of(value, batch)
    assert float(plain) == pytest.approx(cost(1.3), abs=1e-6)
    with_margin, _ = loss_of(value, batch, RewardModelling(margins=True))
    assert float(with_margin) == pytest.approx(cost(0.6), abs=1e-6)
    smoothed, _ = loss_of(value, batch, RewardModelling(label_smoothing=0.2))
    assert float(smoothed) == pytest.approx(0.8 * cost(1.3) + 0.2 * cost(-1.3), abs=1e-6)
    assert reward_reads(RewardModelling(margins=True)) == ("preference", "margin")


def test_centring_charges_for_the_sum_of_the_pairs_scores():
    batch = answers(bools([1], [1]), [1.0, 0.0], [0, 0])
    loss, _ = loss_of(floats([1.5], [0.5]), batch, RewardModelling(centring_coef=0.1))
    assert float(loss) == pytest.approx(cost(1.0) + 0.1 * 4.0, abs=1e-6)


def test_k_answers_count_as_one_prompt():
    """All 6 pairs of 4 ranked answers weigh as much as the one pair of another prompt."""
    batch = answers(bools(*[[1]] * 6), [0.0, -1.0, -2.0, -3.0, 1.0, 0.0], [0, 0, 0, 0, 1, 1])
    scores = [0.9, 0.4, 0.5, -1.0, 0.3, 0.1]
    loss, metrics = loss_of(floats(*[[s] for s in scores]), batch)
    ranked = [cost(scores[i] - scores[j]) for i in range(4) for j in range(i + 1, 4)]
    assert float(loss) == pytest.approx((sum(ranked) / 6 + cost(0.2)) / 2, abs=1e-6)
    assert metrics["rewards/accuracy"] == pytest.approx((5 / 6 + 1) / 2)


def test_per_token_from_the_divergence_on():
    """Answers of 2 and 4 marked tokens: the shorter one's last score stands in, padding is never read."""
    mask = bools([0, 1, 1, 0, 0], [0, 1, 1, 1, 1])
    value = floats([9, 1.0, 2.0, 9, 9], [9, 0.5, 0.0, 1.0, -1.0])
    for preference in ([1.0, 0.0], [0.0, 1.0]):
        sign = 1 if preference[0] else -1
        loss, metrics = loss_of(value, answers(mask, preference, [0, 0]))
        differences = [1.0 - 0.5, 2.0 - 0.0, 2.0 - 1.0, 2.0 + 1.0]
        assert float(loss) == pytest.approx(sum(cost(sign * d) for d in differences) / 4, abs=1e-6)
        assert metrics["rewards/margin"] == pytest.approx(sign * 3.0)


def test_regression_on_scores():
    mask = bools([0, 0, 1], [0, 1, 0])
    batch = experience_of(mask, score=torch.tensor([1.0, -2.0]))
    loss, metrics = loss_of(floats([9, 9, 0.5], [9, -1.0, 9]), batch, RewardModelling(loss="regression"))
    assert float(loss) == pytest.approx((0.25 + 1.0) / 2) and metrics["rewards/error"] == pytest.approx(0.75)
    assert reward_reads(RewardModelling(loss="regression")) == ("score",)


def test_the_score_of_an_answer_is_at_its_last_marked_token():
    mask = bools([1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0], [0, 1, 0, 1, 0])
    value = floats([0.1, 0.2, 0.3, 0.4, 0.5]).repeat(4, 1)
    tokens = TokenBatch.from_experience(experience_of(mask))
    close(last_scores(value[mask], tokens), [0.3, 0.5, 0, 0.4])


SETTINGS = [
    RewardModelling(label_smoothing=0.1, centring_coef=0.05, margins=True),
    RewardModelling(loss="regression"),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_no_gradient_depends_on_the_split(settings):
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(8, 5, generator=generator) > 0.5
    mask[:, 0] = True
    mask[7] = False
    features = torch.randn(8, 5, 4, generator=generator)
    batch = answers(
        mask,
        [1.0, 0.0, 0.0, 1.0, 2.0, 1.0, 0.0, 0.0],
        [0, 0, 1, 1, 2, 2, 2, 3],
        margin=torch.rand(8, generator=generator),
        score=torch.randn(8, generator=generator),
    )

    def gradient(split):
        weight = torch.tensor([0.3, -0.2, 0.1, 0.4], requires_grad=True)
        parts = []
        for rows in split:
            part = batch.select(rows)
            prediction = Prediction((features[rows] @ weight)[part.mask])
            loss, metrics = reward_loss(prediction, TokenBatch.from_experience(part), settings, Denominators.of(batch))
            (loss + 0.0 * weight.sum()).backward()
            parts.append(metrics)
        assert len({tuple(sorted(part)) for part in parts}) == 1
        return weight.grad, metric_results(merge_metrics(parts))

    expected, numbers = gradient([list(range(8))])
    for split in ([[0, 1], [2, 3], [4, 5, 6], [7]], [[3, 2, 6, 4, 5], [], [7, 1, 0]]):
        found, again = gradient(split)
        assert (found - expected).norm() <= 1e-5 * expected.norm()
        assert again == pytest.approx(numbers, rel=1e-5, abs=1e-6)


def test_calibration_of_a_model_that_is_as_right_as_it_is_sure():
    """Of 10 pairs at confidence 0.75, 7.5 are right: the error is 0; of 10 always right ones it is 0.25."""
    sure = math.log(3)
    honest = calibration(torch.tensor([sure] * 7 + [-sure] * 2 + [sure] * 0))
    results = metric_results(honest)
    assert results["calibration/confidence_0.7-0.8"] == pytest.approx(0.75)
    assert results["calibration/accuracy_0.7-0.8"] == pytest.approx(7 / 9)
    assert calibration_error(honest) == pytest.approx(7 / 9 - 0.75, abs=1e-6)
    assert calibration_error(calibration(torch.tensor([sure] * 10))) == pytest.approx(0.25)
    assert results["calibration/brier"] == pytest.approx((7 * 0.0625 + 2 * 0.5625) / 9)
    assert calibration_error(calibration(torch.zeros(0))) == 0.0


def test_calibration_merges_over_micro_batches():
    difference = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 2
    parts = [calibration(part) for part in difference.split([7, 0, 30, 13])]
    assert calibration_error(merge_metrics(parts)) == pytest.approx(
        calibration_error(calibration(difference)), abs=1e-6
    )
    names = {name for part in parts for name in part}
    assert all(set(part) == names for part in parts)


def test_a_linear_reward_model_recovers_a_ranking():
    """K-wise: 5 ranked answers a prompt, scores from features; every pair ends up the right way round."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.tensor([1.0, -2.0, 0.5])
    features = torch.randn(20, 5, 3, generator=generator)
    ranks = -(features @ truth).argsort(1, descending=True).argsort(1).float()
    batch = answers(bools(*[[1]] * 100), ranks.flatten().tolist(), [g for g in range(20) for _ in range(5)])
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.2)
    for _ in range(150):
        loss, metrics = loss_of((features.reshape(100, 3) @ weight)[:, None], batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert metrics["rewards/accuracy"] > 0.98


NAMES = ("a", "b", "c")
SEVERAL = RewardModelling(loss="regression", attributes=NAMES)


def test_several_scores_by_hand_and_missing_ones_teach_nothing():
    """Squared errors 1, 4 and 9; 16 alone; two tokens a row, of which the first is not read in the second row."""
    nan = math.nan
    batch = answers(bools([1, 1], [0, 1]), [0.0, 0.0], [0, 1], attributes=floats([1, 0, 0], [nan, 3, nan]))
    value = torch.tensor([[[2.0, 2, 3], [0, 0, 0]], [[5, 5, 5], [1, 7, 1]]], requires_grad=True)
    loss, metrics = loss_of(value, batch, SEVERAL)
    expected = (((1 + 4 + 9) / 3 + (1 + 0 + 0) / 3) / 2 + 16) / 2
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-6)
    assert metrics["rewards/error/a"] == pytest.approx(1.0) and metrics["rewards/error/b"] == pytest.approx(2.0)
    assert metrics["scores/a"] == pytest.approx(0.5) and metrics["scores/b"] == pytest.approx(3.5)
    loss.backward()
    assert bool((value.grad[1, 0] == 0).all()) and value.grad[1, 1].tolist() == [0.0, 4.0, 0.0]


def test_several_whole_scores_are_transformers_regression():
    """LlamaForSequenceClassification with problem_type regression: mean squared error over rows and labels."""
    from transformers.loss.loss_utils import ForSequenceClassificationLoss

    class Config:
        problem_type, num_labels = "regression", 3

    torch.manual_seed(0)
    value, wanted = torch.randn(5, 1, 3), torch.randn(5, 3)
    batch = answers(bools(*[[1]] * 5), [0.0] * 5, list(range(5)), attributes=wanted)
    found, _ = loss_of(value, batch, SEVERAL)
    expected = ForSequenceClassificationLoss(wanted, value[:, 0], Config())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    single = RewardModelling(loss="regression", attributes=("a",))
    batch = answers(bools(*[[1]] * 5), [0.0] * 5, list(range(5)), attributes=wanted[:, :1])
    found, _ = loss_of(value[:, :, 0], batch, single)
    assert float(found) == pytest.approx(float((value[:, 0, 0] - wanted[:, 0]).square().mean()), abs=1e-6)
