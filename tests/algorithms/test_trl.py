"""Losses and gradients on identical inputs as TRL's trainers compute them (skipped where `trl` is not installed).

TRL's losses are methods of its trainers; here they are called on the few attributes that they read, with a model that
returns given log-probs. TRL 1.16 has no PPO trainer: PPO's policy term is compared with GRPO's, which takes advantages
per token; GAE and the value loss have their closed forms in test_credit.py and test_losses.py.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from megarlhf.algorithms.groups import group_relative, leave_one_out
from megarlhf.algorithms.losses import clipped_policy_loss, ppo_policy_loss
from megarlhf.algorithms.preferences import dpo_loss, kto_credit, kto_loss
from megarlhf.algorithms.reward_model import reward_loss
from megarlhf.algorithms.state import AlgorithmState
from megarlhf.config.algorithms import DPO, GRPO, KTO, PPO, RLOO, RewardModelling
from megarlhf.records import Denominators, Prediction, TokenBatch
from tests.algorithms.batches import experience_of

pytest.importorskip("datasets", reason="trl needs datasets: pip install trl")
pytest.importorskip("trl", reason="pip install trl")

B, T = 6, 5


class Here:
    """One process: what is gathered or reduced is what there is."""

    device = torch.device("cpu")
    num_processes = 1
    sync_gradients = True

    def gather(self, values):
        return values

    gather_for_metrics = gather

    def reduce(self, values, reduction):
        return values


def trainer(**attributes) -> SimpleNamespace:
    common = {
        "accelerator": Here(),
        "model": SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "precompute_ref_logps": True,
        "current_gradient_accumulation_steps": 1,
    }
    return SimpleNamespace(**common | attributes)


@pytest.fixture
def batch():
    """6 rows of 2 to 5 tokens with numbers of a policy that has moved a little."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(T) < torch.tensor([5, 4, 2, 3, 5, 2])[:, None]

    def noise(scale):
        return torch.where(mask, scale * torch.randn(B, T, generator=generator), 0.0)

    start = torch.where(mask, -3 * torch.rand(B, T, generator=generator), 0.0)
    return experience_of(
        mask,
        logp_start=start,
        logp_rollout=start + noise(0.3),
        logp_reference=start + noise(0.5),
        advantage=noise(1.0),
        preference=torch.tensor([1.0, 0.0] * 3),
        group=torch.tensor([0, 0, 1, 1, 2, 2]),
        margin=torch.zeros(B),
    )


@pytest.fixture
def logp(batch):
    generator = torch.Generator().manual_seed(1)
    return torch.where(batch.mask, batch.logp_start + 0.4 * torch.randn(B, T, generator=generator), 0.0)


def ours(function, logp, batch, settings, entropy=None):
    """(loss, gradient [B, T])."""
    variable = logp.clone().requires_grad_()
    entropy = None if entropy is None else entropy[batch.mask]
    prediction = Prediction(variable[batch.mask], entropy)
    loss, _ = function(prediction, TokenBatch.from_experience(batch), settings, Denominators.of(batch))
    loss.backward()
    return loss.detach(), variable.grad


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def answered(log_probs, batch):
    """A model's outputs, 0 where masked as TRL's labels make them; its inputs are of no interest."""
    zeros = torch.zeros(batch.mask.shape)
    outputs = SimpleNamespace(
        log_probs=torch.where(batch.mask, log_probs, 0.0), entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
    )
    return lambda **inputs: outputs


def with_prompt(mask):
    """[B, T+1]: TRL's masks also cover the first token."""
    return torch.cat([torch.zeros(len(mask), 1, dtype=torch.bool), mask], 1).long()


def trl_dpo(logp, batch, loss_type, beta):
    from trl.trainer.dpo_trainer import DPOTrainer

    order = [0, 2, 4, 1, 3, 5]  # TRL puts all chosen rows first
    variable = logp.clone().requires_grad_()
    reference = batch.logp_reference.sum(1)
    inputs = {
        "input_ids": torch.ones(B, T + 1, dtype=torch.long),
        "attention_mask": torch.ones(B, T + 1, dtype=torch.long),
        "completion_mask": with_prompt(batch.mask[order]),
        "ref_chosen_logps": reference[order[:3]],
        "ref_rejected_logps": reference[order[3:]],
    }
    of = trainer(
        beta=beta, loss_types=[loss_type], loss_weights=[1.0], ld_alpha=None, f_divergence_type="reverse_kl",
        use_weighting=False, label_smoothing=0.0,
    )  # fmt: skip
    loss = DPOTrainer._compute_loss(of, answered(variable[order], batch.select(order)), inputs, False)
    loss.backward()
    return loss.detach(), variable.grad


@pytest.mark.parametrize(
    ("loss_type", "settings"),
    [
        ("sigmoid", DPO(beta=0.3)),
        ("ipo", DPO(loss="ipo", beta=0.3)),
        ("sigmoid_norm", DPO(beta=0.3, length_normalised=True)),
    ],
)
def test_dpo_and_ipo_agree(batch, logp, loss_type, settings):
    same(ours(dpo_loss, logp, batch, settings), trl_dpo(logp, batch, loss_type, settings.beta))


def test_the_sft_term_of_dpo_agrees_for_one_pair(batch, logp):
    """TRL averages over all chosen tokens of its batch, here every pair counts the same: one pair is the same."""
    pair = batch.select([0, 1])
    found = ours(dpo_loss, logp[:2], pair, DPO(beta=0.3, sft_coef=1.0))[0]
    plain = ours(dpo_loss, logp[:2], pair, DPO(beta=0.3))[0]
    from trl.trainer.dpo_trainer import DPOTrainer

    of = trainer(
        beta=0.3, loss_types=["sft"], loss_weights=[1.0], ld_alpha=None, f_divergence_type="reverse_kl",
        use_weighting=False, label_smoothing=0.0,
    )  # fmt: skip
    inputs = {
        "input_ids": torch.ones(2, T + 1, dtype=torch.long),
        "attention_mask": torch.ones(2, T + 1, dtype=torch.long),
        "completion_mask": with_prompt(pair.mask),
        "ref_chosen_logps": torch.zeros(1),
        "ref_rejected_logps": torch.zeros(1),
    }
    same([found - plain], [DPOTrainer._compute_loss(of, answered(logp[:2], pair), inputs, False)])


@pytest.mark.parametrize("shift", [2.0, -2.0])
def test_kto_agrees(batch, logp, shift):
    """With the reference point of 6 mismatched rows, which is above 0 or cut at 0."""
    from trl.trainer.kto_trainer import KTOTrainer

    mismatched = batch.replace(
        preference=torch.full((B,), torch.nan), logp_start=batch.logp_reference + shift * batch.mask / T
    )
    kl = (mismatched.logp_start - mismatched.logp_reference).sum(1)
    settings = KTO(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    measured = kto_credit(mismatched, settings, AlgorithmState())[2]["objective/kl"]
    judged = batch.replace(margin=torch.full((B,), measured))
    variable = logp.clone().requires_grad_()
    inputs = {
        "input_ids": torch.ones(B, T + 1, dtype=torch.long),
        "attention_mask": torch.ones(B, T + 1, dtype=torch.long),
        "completion_mask": with_prompt(batch.mask),
        "label": batch.preference.bool(),
        "ref_logps": batch.logp_reference.sum(1),
        "ref_KL_logps": torch.zeros(B),
    }
    of = trainer(
        beta=0.3, loss_type="kto", calculate_KL=True, desirable_weight=1.5, undesirable_weight=0.5,
        _compute_kl_logps=lambda model, inputs: kl,
    )  # fmt: skip
    loss = KTOTrainer._compute_loss(of, answered(variable, batch), inputs, False)
    loss.backward()
    same(ours(kto_loss, logp, judged, settings), (loss.detach(), variable.grad))


def trl_grpo(logp, batch, entropy=None, **attributes):
    from trl.trainer.grpo_trainer import GRPOTrainer

    variable = logp.clone().requires_grad_()
    inputs = {
        "prompt_ids": torch.ones(B, 1, dtype=torch.long),
        "prompt_mask": torch.ones(B, 1, dtype=torch.long),
        "completion_ids": torch.ones(B, T, dtype=torch.long),
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantage,
        "old_per_token_logps": batch.logp_start,
        "ref_per_token_logps": batch.logp_reference,
        "num_items_in_batch": batch.mask.sum().float(),
        "importance_sampling_ratio": (batch.logp_start - batch.logp_rollout).exp().clamp(max=1.1),
    }
    zeros = torch.zeros(B, T)
    defaults = {
        "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.3, "importance_sampling_level": "token",
        "loss_type": "dapo", "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False,
        "vllm_importance_sampling_correction": True, "max_completion_length": 9, "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False, "entropy_coef": 0.0, "delta": None,
        "_get_per_token_logps_and_entropies": lambda *_, **__: (variable, zeros if entropy is None else entropy, None),
    } | attributes  # fmt: skip
    args = SimpleNamespace(delta=defaults.pop("delta"), use_bias_correction_kl=False, steps_per_generation=1)
    loss = GRPOTrainer._compute_loss(trainer(args=args, **defaults), None, inputs)
    loss.backward()
    return loss.detach(), variable.grad


CLIP = {"clip_low": 0.2, "clip_high": 0.3}


@pytest.mark.parametrize(
    ("attributes", "settings"),
    [
        ({}, GRPO(kl_coef=0.0, loss_mean="token", **CLIP)),
        ({"loss_type": "grpo", "beta": 0.2}, GRPO(kl_coef=0.2, **CLIP)),
        ({"loss_type": "bnpo", "beta": 0.2}, GRPO(kl_coef=0.2, loss_mean="token", **CLIP)),
        ({"loss_type": "dr_grpo"}, GRPO(kl_coef=0.0, loss_mean="fixed_length", loss_length=9, **CLIP)),
        ({"delta": 1.4}, GRPO(kl_coef=0.0, loss_mean="token", dual_clip=1.4, **CLIP)),
        ({"use_vllm": True}, GRPO(kl_coef=0.0, loss_mean="token", importance_cap=1.1, **CLIP)),
    ],
    ids=["dapo", "grpo", "bnpo", "dr_grpo", "dual clip", "truncated importance sampling"],
)
def test_grpo_agrees(batch, logp, attributes, settings):
    same(ours(clipped_policy_loss, logp, batch, settings), trl_grpo(logp, batch, **attributes))


def test_the_sequence_ratio_agrees(batch, logp):
    rows = batch.replace(advantage=torch.where(batch.mask, batch.advantage[:, :1], 0.0))
    settings = GRPO(kl_coef=0.0, ratio="sequence_mean", **CLIP)
    expected = trl_grpo(logp, rows, loss_type="grpo", importance_sampling_level="sequence")
    same(ours(clipped_policy_loss, logp, rows, settings), expected)


def test_ppos_policy_term_with_an_entropy_bonus_agrees(batch, logp):
    entropy = torch.rand(B, T, generator=torch.Generator().manual_seed(2))
    expected = trl_grpo(logp, batch, entropy, _entropy_bonus_enabled=True, entropy_coef=0.1)
    same(ours(ppo_policy_loss, logp, batch, PPO(entropy_coef=0.1, **CLIP), entropy), expected)


def test_rloo_agrees(batch, logp):
    from trl.trainer.rloo_trainer import RLOOTrainer

    rows = batch.replace(advantage=torch.where(batch.mask, batch.advantage[:, :1], 0.0))
    variable = logp.clone().requires_grad_()
    inputs = {
        "prompt_ids": torch.ones(B, 1, dtype=torch.long),
        "prompt_mask": torch.ones(B, 1, dtype=torch.long),
        "completion_ids": torch.ones(B, T, dtype=torch.long),
        "completion_mask": batch.mask.long(),
        "advantages": rows.advantage[:, 0],
        "old_logps": batch.logp_start.sum(1),
    }
    of = trainer(
        epsilon_low=0.2, epsilon_high=0.3,
        _get_per_token_logps_and_entropies=lambda *_, **__: (variable, torch.zeros(B, T), None),
    )  # fmt: skip
    loss = RLOOTrainer._compute_loss(of, None, inputs)
    loss.backward()
    same(ours(clipped_policy_loss, logp, rows, RLOO(**CLIP)), (loss.detach(), variable.grad))


@pytest.mark.parametrize("centring", [None, 0.2])
def test_the_reward_models_loss_agrees(batch, centring):
    from trl.trainer.reward_trainer import RewardTrainer

    order, generator = [0, 2, 4, 1, 3, 5], torch.Generator().manual_seed(3)
    score, margin = torch.randn(B, generator=generator), torch.rand(3, generator=generator)
    variable = score.clone().requires_grad_()
    of = trainer(args=SimpleNamespace(center_rewards_coefficient=centring))
    inputs = {"attention_mask": torch.ones(B, T), "margin": margin}
    model = lambda **_: SimpleNamespace(logits=variable[order][:, None])  # noqa: E731
    loss = RewardTrainer.compute_loss(of, model, inputs)
    loss.backward()
    last = torch.zeros(B, T, dtype=torch.bool)
    last[:, 2] = True
    pairs = batch.replace(mask=last, margin=torch.stack([margin, torch.zeros(3)], 1).flatten())
    settings = RewardModelling(margins=True, centring_coef=centring or 0.0)
    found, gradient = ours(reward_loss, torch.where(last, score[:, None], 0.0), pairs, settings)
    same((found, gradient[:, 2]), (loss.detach(), variable.grad))


def test_group_advantages_agree_with_trls_statistics(batch):
    """TRL's own pieces of the formula: nanmean and nanstd over [groups, samples]; its eps is 1e-4, ours 1e-6."""
    from trl.trainer.utils import nanstd

    reward, valid = torch.randn(B, generator=torch.Generator().manual_seed(4)), torch.ones(B, dtype=torch.bool)
    grouped = reward.view(2, 3)
    group = torch.arange(2).repeat_interleave(3)
    expected = (grouped - grouped.nanmean(1, keepdim=True)) / (nanstd(grouped, dim=1)[:, None] + 1e-6)
    same([group_relative(reward, group, valid, "unbiased")], [expected.flatten()])
    baseline = (grouped.nansum(1, keepdim=True) - grouped) / 2
    same([leave_one_out(reward, group, valid)], [(grouped - baseline).flatten()])
