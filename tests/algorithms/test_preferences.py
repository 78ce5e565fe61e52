"""Claims about DPO, IPO, KTO and supervised fine-tuning, by hand and by closed form."""

import math

import pytest
import torch

from megarlhf.algorithms.pairs import pairs
from megarlhf.algorithms.preferences import dpo_loss, kto_credit, kto_loss, kto_reads, sft_loss, with_mismatched
from megarlhf.algorithms.state import AlgorithmState
from megarlhf.config.algorithms import DPO, KTO, SFT
from megarlhf.records import Denominators, Experience, Prediction, TokenBatch, merge_metrics, metric_results
from tests.algorithms.batches import bools, close, experience_of, floats


def spread(totals, lengths) -> torch.Tensor:
    """Rows whose tokens sum to the given totals, 0 behind their length."""
    sizes = zip(totals, lengths, strict=True)
    return floats(*[[total / length] * length + [0.0] * (max(lengths) - length) for total, length in sizes])


def answers(reference, lengths, preference, group) -> Experience:
    mask = bools(*[[1] * length + [0] * (max(lengths) - length) for length in lengths])
    return experience_of(
        mask,
        logp_reference=spread(reference, lengths),
        preference=torch.tensor(preference),
        group=torch.tensor(group),
    )


def loss_of(function, logp, batch, settings):
    tokens = TokenBatch.from_experience(batch)
    loss, metrics = function(Prediction(logp[batch.mask]), tokens, settings, Denominators.of(batch))
    return loss, metric_results(metrics)


PAIR = answers([-11.0, -11.5], [5, 4], [1.0, 0.0], [0, 0])
PAIR_LOGP = spread([-10.0, -12.0], [5, 4])


def test_the_reference_pair():
    """Chosen -10 over 5 tokens (reference -11), rejected -12 over 4 (reference -11.5)."""
    loss, metrics = loss_of(dpo_loss, PAIR_LOGP, PAIR, DPO(beta=0.1))
    assert float(loss) == pytest.approx(0.620957, abs=1e-6)
    assert metrics["rewards/margin"] == pytest.approx(0.15, abs=1e-6) and metrics["rewards/accuracy"] == 1.0
    assert metrics["logp/chosen"] == pytest.approx(-10) and metrics["logp/rejected"] == pytest.approx(-12)
    smoothed, _ = loss_of(dpo_loss, PAIR_LOGP, PAIR, DPO(beta=0.1, label_smoothing=0.1))
    assert float(smoothed) == pytest.approx(0.635957, abs=1e-6)
    ipo, _ = loss_of(dpo_loss, PAIR_LOGP, PAIR, DPO(loss="ipo", beta=0.1))
    assert float(ipo) == pytest.approx(21.855625, abs=1e-4)
    normalised, _ = loss_of(dpo_loss, PAIR_LOGP, PAIR, DPO(beta=0.1, length_normalised=True))
    assert float(normalised) == pytest.approx(math.log1p(math.exp(-0.1 * 0.325)), abs=1e-6)


def test_the_sft_term_is_the_chosen_answers_negative_log_prob_per_token():
    plain, _ = loss_of(dpo_loss, PAIR_LOGP, PAIR, DPO())
    added, metrics = loss_of(dpo_loss, PAIR_LOGP, PAIR, DPO(sft_coef=0.5))
    assert float(added - plain) == pytest.approx(0.5 * 10 / 5, abs=1e-6)
    assert metrics["loss/sft_avg"] == pytest.approx(2.0)
    assert metrics["loss/dpo_avg"] == pytest.approx(float(plain)), "the preference alone: ln 2 before any update"


def test_before_any_update_the_loss_is_ln_2_and_the_accuracy_half():
    loss, metrics = loss_of(dpo_loss, PAIR.logp_reference, PAIR, DPO())
    assert float(loss) == pytest.approx(math.log(2), abs=1e-7) and metrics["rewards/accuracy"] == 0.5


@pytest.mark.parametrize(("margin", "expected"), [(2.0, 0.126928), (0.0, 0.693147), (-50.0, 50.0), (-200.0, 200.0)])
def test_no_margin_overflows(margin, expected):
    batch = answers([0.0, 0.0], [1, 1], [1.0, 0.0], [0, 0])
    logp = floats([margin], [0.0]).requires_grad_()
    loss, _ = loss_of(dpo_loss, logp, batch, DPO(beta=1.0))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-5) and bool(logp.grad.isfinite().all())


def test_prompts_of_all_four_rows_change_nothing():
    """Two pairs with prompts of 3 tokens: neither half of the batch sees log-probs of a prompt."""
    mask = bools([0, 0, 1, 1, 1], [0, 0, 1, 1, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 1])
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 5, 7, generator=generator, requires_grad=True)
    targets = torch.randint(0, 7, (4, 5, 1), generator=generator)
    logp = logits.log_softmax(-1).gather(2, targets)[..., 0]
    batch = experience_of(
        mask,
        logp_reference=torch.randn(4, 5, generator=generator),
        preference=torch.tensor([1.0, 0.0, 1.0, 0.0]),
        group=torch.tensor([0, 0, 1, 1]),
    )
    loss_of(dpo_loss, logp, batch, DPO(sft_coef=1.0))[0].backward()
    assert not logits.grad[~mask].any() and bool(logits.grad[mask].any(-1).all())


def test_all_pairs_of_ranked_answers_count_one_group_together():
    """Ranks 0, 1, 1, 2 make 5 comparisons: the tie is none."""
    batch = answers([0.0] * 6, [1] * 6, [0.0, -1.0, -1.0, -2.0, 1.0, 0.0], [4, 4, 4, 4, 9, 9])
    compared = pairs(TokenBatch.from_experience(batch))
    found = set(zip(compared.better.tolist(), compared.worse.tolist(), strict=True))
    assert found == {(0, 1), (0, 2), (0, 3), (1, 3), (2, 3), (4, 5)}
    logp = floats([0.5], [0.1], [0.3], [-0.2], [0.0], [1.0])
    loss, _ = loss_of(dpo_loss, logp, batch, DPO(beta=1.0))

    def cost(margin):
        return math.log1p(math.exp(-margin))

    ranked = sum(cost(float(logp[i] - logp[j])) for i, j in found if i < 4) / 5
    assert float(loss) == pytest.approx((ranked + cost(-1.0)) / 2, abs=1e-6)


def test_an_empty_answer_is_compared_with_nothing():
    batch = answers([0.0, 0.0, 0.0, 0.0], [1, 1, 1, 1], [1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1])
    batch = batch.replace(mask=bools([1], [0], [1], [1]))
    compared = pairs(TokenBatch.from_experience(batch))
    assert (compared.better.tolist(), compared.worse.tolist()) == ([2], [3])


SETTINGS = [
    (dpo_loss, DPO(label_smoothing=0.1, sft_coef=0.3)),
    (dpo_loss, DPO(loss="ipo")),
    (dpo_loss, DPO(length_normalised=True)),
    (kto_loss, KTO(desirable_weight=1.3, undesirable_weight=0.7)),
    (sft_loss, SFT()),
    (sft_loss, SFT(loss_mean="sequence")),
]


@pytest.mark.parametrize(("function", "settings"), SETTINGS)
def test_no_gradient_depends_on_the_split(function, settings):
    """A linear model: groups kept together, any micro-batches (one empty) sum to the gradient of the whole."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(7, 5, generator=generator) > 0.4
    mask[:, 0] = True
    features = torch.randn(7, 5, 4, generator=generator)
    batch = experience_of(
        mask,
        logp_reference=torch.randn(7, 5, generator=generator),
        preference=torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 1.0, 0.0]),
        group=torch.tensor([0, 0, 1, 1, 2, 2, 2]),
        margin=torch.full((7,), 0.2),
    )

    def gradient(split):
        weight = torch.tensor([0.3, -0.2, 0.1, 0.4], requires_grad=True)
        parts = []
        for rows in split:
            part = batch.select(rows)
            prediction = Prediction((features[rows] @ weight)[part.mask])
            loss, metrics = function(prediction, TokenBatch.from_experience(part), settings, Denominators.of(batch))
            (loss + 0.0 * weight.sum()).backward()
            parts.append(metrics)
        assert len({tuple(sorted(part)) for part in parts}) == 1
        return weight.grad, metric_results(merge_metrics(parts))

    expected, numbers = gradient([list(range(7))])
    for split in ([[0, 1], [2, 3], [4, 5, 6]], [[3, 2, 6, 4, 5], [], [1, 0]]):
        found, again = gradient(split)
        assert (found - expected).norm() <= 1e-5 * expected.norm()
        assert again == pytest.approx(numbers, rel=1e-5, abs=1e-6)


def test_sft_is_the_mean_negative_log_prob_of_marked_tokens():
    batch = experience_of(bools([1, 1, 0], [0, 1, 0]))
    logp = floats([-1, -2, -100], [-100, -6, -100])
    assert float(loss_of(sft_loss, logp, batch, SFT())[0]) == 3.0
    assert float(loss_of(sft_loss, logp, batch, SFT(loss_mean="sequence"))[0]) == 3.75
    assert loss_of(sft_loss, logp, batch, SFT())[1] == {"loss/sft_avg": 3.0}


def test_kto_by_its_equation():
    batch = answers([-3.0, -1.0, -2.0], [2, 1, 3], [1.0, 0.0, 1.0], [0, 1, 2]).replace(margin=torch.full((3,), 0.4))
    logp = spread([-2.0, -1.5, -2.5], [2, 1, 3])
    settings = KTO(beta=0.5, desirable_weight=1.5, undesirable_weight=2.0)
    loss, metrics = loss_of(kto_loss, logp, batch, settings)

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    expected = [
        1.5 * (1 - sigmoid(0.5 * (1.0 - 0.4))),
        2.0 * (1 - sigmoid(0.5 * (0.4 + 0.5))),
        1.5 * (1 - sigmoid(0.5 * (-0.5 - 0.4))),
    ]
    assert float(loss) == pytest.approx(sum(expected) / 3, abs=1e-6)
    assert metrics["rewards/chosen"] == pytest.approx(0.5 * (1.0 - 0.5) / 2)
    assert metrics["rewards/rejected"] == pytest.approx(-0.25)


def judged() -> Experience:
    return Experience.from_completions(
        [[1, 2], [3], [4, 5, 6]],
        [[7], [8, 9, 10, 11], [12, 13]],
        None,
        row_id=[10, 11, 12],
        group=[0, 1, 2],
        finished=[True, True, False],
        prompts=("a", "b", "c"),
        responses=("x", "y", "z"),
    ).replace(preference=torch.tensor([1.0, 0.0, 1.0]))


def test_mismatched_rows_pair_each_prompt_with_the_next_answer():
    batch = judged()
    wide = with_mismatched(batch, KTO())
    assert wide.num_rows == 6 and torch.equal(wide.select([0, 1, 2]).tokens[:, : batch.tokens.shape[1]], batch.tokens)
    rows = [row[:length] for row, length in zip(wide.tokens.tolist(), wide.lengths.tolist(), strict=True)]
    assert rows[3:] == [[1, 2, 8, 9, 10, 11], [3, 12, 13], [4, 5, 6, 7]]
    trained = [wide.tokens[row, 1:][wide.mask[row]].tolist() for row in range(6)]
    assert trained == [[7], [8, 9, 10, 11], [12, 13], [8, 9, 10, 11], [12, 13], [7]]
    assert wide.preference[:3].tolist() == [1, 0, 1] and bool(wide.preference[3:].isnan().all())
    assert len(set(wide.group.tolist())) == 6
    assert with_mismatched(batch, KTO(reference_point="zero")) is batch


def test_the_reference_point_is_the_kl_of_mismatched_rows_and_never_negative():
    wide = with_mismatched(judged(), KTO())
    own = torch.where(wide.preference.isnan()[:, None], 0.5, 99.0) * wide.mask
    filled = wide.replace(logp_start=own, logp_reference=torch.zeros_like(own))
    batch, state, metrics = kto_credit(filled, KTO(), AlgorithmState())
    expected = 0.5 * (4 + 2 + 1) / 3
    assert metrics["objective/kl"] == pytest.approx(expected) and state == AlgorithmState()
    assert batch.num_rows == 3 and batch.preference.tolist() == [1, 0, 1]
    close(batch.margin, [expected] * 3)
    negative, _, _ = kto_credit(filled.replace(logp_start=-own), KTO(), AlgorithmState())
    assert not negative.margin.any()


def test_without_a_reference_point_kto_needs_no_policy_scores():
    assert "logp_start" in kto_reads(KTO()) and "logp_start" not in kto_reads(KTO(reference_point="zero"))
    batch = judged().replace(logp_reference=torch.zeros(3, 4))
    plain, _, _ = kto_credit(batch, KTO(reference_point="zero"), AlgorithmState())
    assert plain.margin.tolist() == [0, 0, 0]
