"""Claims about the losses: values by hand, gradients by closed form and finite differences, any split the same."""

import math

import pytest
import torch

from megarlhf.algorithms.losses import clipped_policy_loss, clipped_value_loss, needs_entropy, ppo_policy_loss
from megarlhf.algorithms.state import after_ppo_step, ppo_settings_now, ppo_state
from megarlhf.config.algorithms import GRPO, PPO, RLOO, ReinforcePlusPlus
from megarlhf.records import Denominators, Experience, Prediction, TokenBatch, merge_metrics, metric_results
from tests.algorithms.batches import bools, experience_of, floats, whole

LOGP = floats([-1, -1, -2, -0.5, -1], [-1, -3, -1, 0, 0])
OLD = floats([-1, -1.5, -1.5, -0.5, -2], [-1.2, -1, -1, 0, 0])
ADVANTAGE = floats([1, 1, -1, 0.5, -1], [2, -1, 0, 9, 9])
MASK = bools([1, 1, 1, 1, 1], [1, 1, 1, 0, 0])


def policy_batch(mask=MASK, old=OLD, advantage=ADVANTAGE) -> Experience:
    return experience_of(mask, logp_start=old, advantage=advantage)


def test_clipped_policy_loss_of_the_reference_batch():
    batch = policy_batch()
    tokens = TokenBatch.from_experience(batch)
    loss, metrics = clipped_policy_loss(Prediction(LOGP[MASK]), tokens, PPO(), Denominators.of(batch))
    results = metric_results(metrics)
    assert abs(float(loss) + 0.097715) < 1e-6 and abs(results["loss/policy_avg"] + 0.097715) < 1e-6
    assert results["policy/clipfrac_avg"] == 0.5
    difference = (LOGP - OLD)[MASK]
    assert abs(results["policy/approxkl_avg"] - float((difference**2).mean() / 2)) < 1e-6
    assert abs(results["val/ratio"] - float(difference.exp().mean())) < 1e-6


def test_each_token_of_the_reference_batch():
    expected = [-1, -1.2, 0.8, -0.5, 2.718282, -2.4, 0.8, 0]
    for i, wanted in enumerate(expected):
        only = torch.zeros(8)
        only[i] = ADVANTAGE[MASK][i]
        batch = policy_batch(bools([1] * 8), OLD[MASK][None], only[None])
        loss, _ = clipped_policy_loss(Prediction(LOGP[MASK]), TokenBatch.from_experience(batch), PPO(), whole(1.0))
        assert abs(float(loss) - wanted) < 1e-5


def test_policy_gradient_is_minus_a_r_where_it_is_not_clipped_and_0_where_it_is():
    logp = LOGP[MASK].clone().requires_grad_()
    loss, _ = clipped_policy_loss(Prediction(logp), TokenBatch.from_experience(policy_batch()), PPO(), whole(1.0))
    loss.backward()
    ratio = (LOGP - OLD)[MASK].exp()
    clipped = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0]).bool()
    torch.testing.assert_close(logp.grad, torch.where(clipped, 0.0, -ADVANTAGE[MASK] * ratio))


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high", "expected"),
    [(2.0, 1.0, 0.2, 0.5, -1.5), (2.0, 1.0, 0.5, 0.2, -1.2), (0.25, -1.0, 0.2, 0.5, 0.8), (0.25, -1.0, 0.5, 0.2, 0.5)],
)
def test_low_and_high_clip_are_separate(ratio, advantage, low, high, expected):
    tokens = TokenBatch.from_experience(policy_batch(bools([1]), floats([0]), floats([advantage])))
    loss, _ = clipped_policy_loss(
        Prediction(torch.tensor([ratio]).log()), tokens, PPO(clip_low=low, clip_high=high), whole(1.0)
    )
    assert abs(float(loss) - expected) < 1e-6


def test_before_any_update_the_ratio_is_1_and_nothing_is_clipped():
    batch = policy_batch()
    loss, metrics = clipped_policy_loss(
        Prediction(OLD[MASK]), TokenBatch.from_experience(batch), PPO(), Denominators.of(batch)
    )
    results = metric_results(metrics)
    assert results["val/ratio"] == 1.0 and results["policy/clipfrac_avg"] == results["policy/approxkl_avg"] == 0.0
    assert abs(float(loss) + float(ADVANTAGE[MASK].mean())) < 1e-6


def finite_difference(function, point, step=1e-3):
    """Central differences, in float64 outside the function."""
    slopes = []
    for i in range(len(point)):
        shift = torch.zeros_like(point)
        shift[i] = step
        slopes.append((float(function(point + shift)) - float(function(point - shift))) / (2 * step))
    return torch.tensor(slopes)


def random_tokens(seed) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    names = ("logp_old", "advantage", "value", "target")
    noise = {name: torch.randn(6, generator=generator) for name in names}
    return TokenBatch(row=torch.zeros(6, dtype=torch.int64), num_rows=1, **noise)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("loss", [clipped_policy_loss, clipped_value_loss])
def test_gradients_equal_finite_differences(loss, seed):
    tokens = random_tokens(seed)
    point = torch.randn(6, generator=torch.Generator().manual_seed(seed + 100)) * 0.3
    point = (tokens.logp_old if loss is clipped_policy_loss else tokens.value) + point
    variable = point.clone().requires_grad_()
    loss(Prediction(variable), tokens, PPO(), whole(3.0))[0].backward()
    slopes = finite_difference(lambda x: loss(Prediction(x), tokens, PPO(), whole(3.0))[0], point)
    torch.testing.assert_close(variable.grad, slopes, rtol=2e-2, atol=2e-3)


def test_value_clipping_uses_the_value_at_rollout():
    tokens = TokenBatch.from_experience(experience_of(bools([1]), value=floats([5]), target=floats([10])))
    loss, metrics = clipped_value_loss(Prediction(torch.tensor([1.0])), tokens, PPO(value_clip=0.2), whole(1.0))
    assert float(loss) == 40.5 and metric_results(metrics)["val/clipfrac_avg"] == 0.0
    clipped, metrics = clipped_value_loss(Prediction(torch.tensor([9.0])), tokens, PPO(value_clip=0.2), whole(1.0))
    assert abs(float(clipped) - 0.5 * 4.8**2) < 1e-5 and metric_results(metrics)["val/clipfrac_avg"] == 1.0


def test_without_value_clipping_it_is_half_the_squared_error():
    tokens = TokenBatch.from_experience(experience_of(bools([1, 1]), value=floats([5, 0]), target=floats([10, 1])))
    value = torch.tensor([9.0, 4.0], requires_grad=True)
    loss, metrics = clipped_value_loss(Prediction(value), tokens, PPO(value_clip=0.0), whole(2.0))
    loss.backward()
    assert float(loss.detach()) == 2.5 and value.grad.tolist() == [-0.5, 1.5]
    assert metric_results(metrics) == {"loss/value_avg": 2.5}


def test_prompt_and_tool_tokens_get_exactly_no_gradient():
    """Prompt 3, response 2, tool output 2, response 1, over logits [1, T, V]."""
    mask = bools([0, 0, 1, 1, 0, 0, 1])
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 7, 11, generator=generator, requires_grad=True)
    targets = torch.randint(0, 11, (1, 7, 1), generator=generator)
    logp = logits.log_softmax(-1).gather(2, targets)[..., 0]
    batch = policy_batch(mask, logp.detach(), torch.randn(1, 7, generator=generator))
    clipped_policy_loss(Prediction(logp[mask]), TokenBatch.from_experience(batch), PPO(), Denominators.of(batch))[
        0
    ].backward()
    assert not logits.grad[~mask].any() and logits.grad[mask].any(dim=-1).all()


def test_padding_sentinels_reach_no_statistic():
    batch = policy_batch(bools([1, 1, 0, 0]), floats([-1, -2, 1, 1]), floats([1, 1, 9, 9]))
    tokens = TokenBatch.from_experience(batch)
    assert float(-tokens.logp_old.mean()) == 1.5


def token_losses(rows) -> Experience:
    """Rows whose tokens have the given policy losses while the ratio is 1."""
    width = max(len(row) for row in rows)
    mask = bools(*[[1] * len(row) + [0] * (width - len(row)) for row in rows])
    advantage = floats(*[[-value for value in row] + [0.0] * (width - len(row)) for row in rows])
    return policy_batch(mask, torch.zeros(mask.shape), advantage)


@pytest.mark.parametrize(
    "split", [[[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]], [[3, 0], [1], [2]], [[1, 3], [0, 2]]]
)
def test_the_token_mean_does_not_depend_on_the_split(split):
    """A model of one parameter: logp = parameter everywhere, so the gradient is the loss."""
    batch = token_losses([[4], [1, 1, 1], [2, 2], [0, 0, 0, 0]])
    parameter = torch.zeros((), requires_grad=True)
    total, parts = 0.0, []
    for rows in split:
        tokens = TokenBatch.from_experience(batch.select(rows))
        loss, metrics = clipped_policy_loss(
            Prediction(parameter.expand(tokens.num_tokens)), tokens, PPO(), Denominators.of(batch)
        )
        loss.backward()
        total += float(loss.detach())
        parts.append(metrics)
    assert abs(total - 1.1) < 1e-6 and abs(float(parameter.grad) - 1.1) < 1e-6
    assert abs(metric_results(merge_metrics(parts))["loss/policy_avg"] - 1.1) < 1e-6


def test_the_denominator_honours_the_mask_that_the_numerator_honours():
    batch = token_losses([[1.0] * 5] * 6)
    assert batch.num_tokens == 30
    dropped = batch.replace(mask=batch.mask & (torch.arange(6) != 4)[:, None])
    tokens = TokenBatch.from_experience(dropped)
    assert dropped.num_tokens == 25
    assert float(clipped_policy_loss(Prediction(torch.zeros(25)), tokens, PPO(), Denominators.of(dropped))[0]) == 1.0


@pytest.mark.parametrize("loss", [clipped_policy_loss, clipped_value_loss])
def test_an_all_masked_minibatch_has_no_loss_and_no_gradient(loss):
    batch = experience_of(bools([0, 0]), advantage=floats([1, 1]), target=floats([1, 1]))
    weight = torch.ones(2, requires_grad=True)
    value, metrics = loss(
        Prediction(weight[batch.mask[0]]), TokenBatch.from_experience(batch), PPO(), Denominators.of(batch)
    )
    value.backward()
    assert float(value.detach()) == 0.0 and weight.grad.tolist() == [0, 0] and metric_results(metrics) == {}


def test_wrong_lengths_and_halves_are_refused():
    tokens = random_tokens(0)
    with pytest.raises(AssertionError, match=r"\[5\] values for \[6\] valid tokens"):
        clipped_policy_loss(Prediction(torch.zeros(5)), tokens, PPO(), whole(1.0))
    with pytest.raises(AssertionError, match="float32, not torch.bfloat16"):
        clipped_value_loss(Prediction(torch.zeros(6, dtype=torch.bfloat16)), tokens, PPO(), whole(1.0))


def one_token(advantage, logp_old=0.0, **fields) -> TokenBatch:
    return TokenBatch.from_experience(
        policy_batch(bools([1]), floats([logp_old]), floats([advantage])).replace(**fields)
    )


def test_dual_clip_bounds_the_loss_of_a_bad_action_and_stops_its_gradient():
    logp = torch.tensor([10.0]).log().requires_grad_()
    loss, metrics = clipped_policy_loss(Prediction(logp), one_token(-1.0), PPO(dual_clip=3.0), whole(1.0))
    loss.backward()
    assert float(loss.detach()) == 3.0 and float(logp.grad) == 0.0
    assert metric_results(metrics)["policy/clipfrac_avg"] == 1.0
    unclipped, _ = clipped_policy_loss(Prediction(logp), one_token(-1.0), PPO(), whole(1.0))
    assert float(unclipped.detach()) == pytest.approx(10.0)
    good, _ = clipped_policy_loss(Prediction(logp), one_token(1.0), PPO(dual_clip=3.0), whole(1.0))
    assert float(good.detach()) == pytest.approx(-1.2)


def test_sequence_means_of_the_reference_batch():
    batch = policy_batch()
    tokens = TokenBatch.from_experience(batch)
    loss, _ = clipped_policy_loss(Prediction(LOGP[MASK]), tokens, PPO(loss_mean="sequence"), Denominators.of(batch))
    assert abs(float(loss) + 0.184839) < 1e-6


def test_the_ratio_of_a_sequence_is_the_product_or_the_geometric_mean_of_its_tokens():
    tokens = TokenBatch.from_experience(policy_batch())
    difference = LOGP - OLD
    for ratio, exponents in (
        ("sequence", [difference[0].sum(), difference[1, :3].sum()]),
        ("sequence_mean", [difference[0].mean(), difference[1, :3].mean()]),
    ):
        settings = GRPO(ratio=ratio, kl_coef=0.0, clip_low=0.9, clip_high=100.0, loss_mean="token")
        loss, metrics = clipped_policy_loss(Prediction(LOGP[MASK]), tokens, settings, whole(8.0))
        r = torch.stack(exponents).exp()
        expected = -(r[0] * ADVANTAGE[0].sum() + r[1] * ADVANTAGE[1, :3].sum()) / 8
        assert float(loss) == pytest.approx(float(expected), abs=1e-6)
        assert metric_results(metrics)["val/ratio"] == pytest.approx(float((5 * r[0] + 3 * r[1]) / 8))


def test_before_any_update_a_sequence_ratio_sends_the_advantage_to_every_token():
    """GSPO's gradient at ratio 1: -A / length on each token of a response."""
    logp = OLD[MASK].clone().requires_grad_()
    advantage = floats([2, 2, 2, 2, 2], [-1, -1, -1, 0, 0])
    batch = policy_batch(advantage=advantage)
    settings = GRPO(ratio="sequence_mean", kl_coef=0.0)
    clipped_policy_loss(Prediction(logp), TokenBatch.from_experience(batch), settings, Denominators.of(batch))[
        0
    ].backward()
    torch.testing.assert_close(logp.grad, torch.tensor([-2 / 5] * 5 + [1 / 3] * 3) / 2)


def test_an_entropy_bonus_is_taken_off_the_loss():
    entropy = torch.tensor([0.5, 1.5], requires_grad=True)
    batch = policy_batch(bools([1, 1]), floats([0, 0]), floats([0, 0]))
    tokens = TokenBatch.from_experience(batch)
    loss, metrics = ppo_policy_loss(
        Prediction(torch.zeros(2), entropy), tokens, PPO(entropy_coef=0.1), Denominators.of(batch)
    )
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-0.1) and entropy.grad.tolist() == pytest.approx([-0.05, -0.05])
    assert metric_results(metrics)["policy/entropy_avg"] == 1.0
    assert needs_entropy(PPO(entropy_coef=0.1)) and not needs_entropy(PPO())
    with pytest.raises(AssertionError, match="entropy bonus needs the entropy"):
        ppo_policy_loss(Prediction(torch.zeros(2)), tokens, PPO(entropy_coef=0.1), whole(2.0))


@pytest.mark.parametrize(
    ("estimator", "value", "slope"), [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", 0.106531, 0.393469)]
)
def test_the_kl_in_the_loss_has_the_estimators_value_and_gradient(estimator, value, slope):
    logp = torch.zeros(1, requires_grad=True)
    tokens = one_token(0.0, logp_reference=floats([-0.5]))
    settings = GRPO(kl_coef=2.0, kl_estimator=estimator)
    loss, metrics = clipped_policy_loss(Prediction(logp), tokens, settings, whole(1.0))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(2 * value, abs=2e-6)
    assert float(logp.grad) == pytest.approx(2 * slope, abs=2e-6)
    assert metric_results(metrics)["loss/kl_avg"] == pytest.approx(value, abs=1e-6)


def test_importance_between_sampler_and_trainer_is_truncated_and_carries_no_gradient():
    gap = torch.tensor([0.5, 3.0, -1.0])
    batch = policy_batch(bools([1, 1, 1]), floats([0, 0, 0]), floats([1, 1, -2]))
    batch = batch.replace(logp_rollout=batch.logp_start - gap)
    logp = torch.zeros(3, requires_grad=True)
    loss, metrics = clipped_policy_loss(
        Prediction(logp), TokenBatch.from_experience(batch), PPO(importance_cap=2.0), Denominators.of(batch)
    )
    loss.backward()
    weight = torch.tensor([0.5, 3.0, -1.0]).exp().clamp(max=2.0)
    torch.testing.assert_close(logp.grad, -weight * torch.tensor([1.0, 1.0, -2.0]) / 3)
    results = metric_results(metrics)
    assert results["policy/importance_avg"] == pytest.approx(float(weight.mean()))
    assert results["policy/importance_capped_avg"] == pytest.approx(1 / 3)


def test_ppo_kl_charges_for_leaving_the_policy_that_sampled():
    logp = torch.tensor([0.5], requires_grad=True)
    settings = PPO(policy_loss="penalty", penalty_coef=3.0)
    loss, metrics = ppo_policy_loss(Prediction(logp), one_token(2.0), settings, whole(1.0))
    loss.backward()
    r = math.exp(0.5)
    assert float(loss.detach()) == pytest.approx(-2 * r + 3 * (r - 1 - 0.5), abs=1e-6)
    assert float(logp.grad) == pytest.approx(-2 * r + 3 * (r - 1), abs=1e-6)
    assert "policy/clipfrac_avg" not in metrics
    at_start = torch.zeros(1, requires_grad=True)
    ppo_policy_loss(Prediction(at_start), one_token(0.0), settings, whole(1.0))[0].backward()
    assert float(at_start.grad) == 0.0


def test_beta_doubles_and_halves_around_its_target():
    settings = PPO(policy_loss="penalty", penalty_target=0.01, penalty_coef=0.4)
    start = ppo_state(settings)
    for kl, expected in ((0.0151, 0.8), (0.0149, 0.4), (0.0068, 0.4), (0.0066, 0.2)):
        after = after_ppo_step(start, settings, {"policy/approxkl_avg": kl})
        assert after.penalty == pytest.approx(expected)
        assert ppo_settings_now(settings, after).penalty_coef == after.penalty
    assert after_ppo_step(start, PPO(), {"policy/approxkl_avg": 9.0}) == start
    assert after_ppo_step(start, settings, {}) == start


FULL = [
    PPO(dual_clip=3.0, entropy_coef=0.01, importance_cap=2.0, kl_in="loss", kl_estimator="k3"),
    PPO(policy_loss="penalty", loss_mean="sequence"),
    GRPO(),
    GRPO(loss_mean="fixed_length", loss_length=9, group_std="none"),
    GRPO(ratio="sequence_mean"),
    RLOO(),
    ReinforcePlusPlus(entropy_coef=0.1),
]


@pytest.mark.parametrize("settings", FULL)
def test_no_policy_gradient_depends_on_the_split(settings):
    """A linear model of one weight vector: any micro-batches, one of them empty, give the gradient of the whole."""
    generator = torch.Generator().manual_seed(0)
    mask = bools([1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 1, 0, 0])

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    features, slopes = noise(6, 5, 4), noise(6, 5, 4)
    batch = experience_of(
        mask, logp_start=noise(6, 5), logp_rollout=noise(6, 5), logp_reference=noise(6, 5), advantage=noise(6, 5)
    )

    def gradient(split):
        weight = torch.tensor([0.3, -0.2, 0.1, 0.4], requires_grad=True)
        parts = []
        for rows in split:
            part = batch.select(rows)
            prediction = Prediction((features[rows] @ weight)[part.mask], (slopes[rows] @ weight)[part.mask])
            policy_loss = ppo_policy_loss if isinstance(settings, PPO) else clipped_policy_loss
            loss, metrics = policy_loss(prediction, TokenBatch.from_experience(part), settings, Denominators.of(batch))
            (loss + 0.0 * weight.sum()).backward()
            parts.append(metrics)
        assert len({tuple(sorted(part)) for part in parts}) == 1
        return weight.grad, metric_results(merge_metrics(parts))

    expected, numbers = gradient([[0, 1, 2, 3, 4, 5]])
    for split in ([[0], [1], [2], [3], [4], [5]], [[5, 2, 0], [], [1, 3, 4]], [[0, 1, 2], [3, 4, 5]]):
        found, again = gradient(split)
        assert (found - expected).norm() <= 1e-5 * expected.norm()
        assert again == pytest.approx(numbers, rel=1e-5, abs=1e-6)
