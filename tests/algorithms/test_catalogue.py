"""Claims about the catalogue: what each algorithm says it reads, and that it learns."""

import dataclasses

import pytest
import torch

from megarlhf.algorithms.catalogue import (
    ALGORITHMS,
    DPO,
    GRPO,
    KTO,
    PPO,
    REINFORCE_PLUS_PLUS,
    REWARD_MODELLING,
    RLOO,
    SFT,
)
from megarlhf.config import algorithms as config
from megarlhf.records import Denominators, Experience, Prediction, TokenBatch
from tests.algorithms.batches import bools, experience_of

FIELDS = {field.name for field in dataclasses.fields(Experience)}
VARIANTS = [
    (PPO, config.PPO(whiten_advantages="minibatch")),
    (PPO, config.PPO(policy_loss="penalty", kl_in="loss", kl_estimator="k3", importance_cap=2.0)),
    (GRPO, config.GRPO()),
    (RLOO, config.RLOO()),
    (REINFORCE_PLUS_PLUS, config.ReinforcePlusPlus(baseline=True)),
    (DPO, config.DPO()),
    (KTO, config.KTO()),
    (KTO, config.KTO(reference_point="zero")),
    (SFT, config.SFT()),
    (REWARD_MODELLING, config.RewardModelling(margins=True)),
    (REWARD_MODELLING, config.RewardModelling(loss="regression")),
]


def full_batch() -> Experience:
    return experience_of(
        bools([1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 1, 1]),
        score=torch.tensor([1.0, -1.0, 0.5, 0.0]),
        group=torch.tensor([3, 3, 5, 5]),
        preference=torch.tensor([1.0, 0.0, 1.0, 0.0]),
        margin=torch.tensor([0.5, 0.0, 0.1, 0.0]),
    )


def run(algorithm, settings, batch) -> dict:
    """From before scoring to the losses, with scorers that answer 0; the metrics of all."""
    state = algorithm.initial_state(settings)
    batch, numbers = algorithm.before_scoring(batch, settings), {}
    zeros = torch.zeros(batch.mask.shape)
    scored = {name: zeros for name in algorithm.reads(settings) if name.startswith("logp_") or name == "value"}
    batch = batch.replace(**scored)
    if algorithm.credit is not None:
        batch, state, numbers = algorithm.credit(batch, settings, state)
    minibatch = algorithm.prepare_minibatch(batch, settings)
    tokens, now = TokenBatch.from_experience(minibatch), algorithm.settings_now(settings, state)
    prediction = Prediction(torch.zeros(minibatch.num_tokens), torch.zeros(minibatch.num_tokens))
    for loss in (algorithm.actor_loss, algorithm.critic_loss):
        if loss is not None:
            value, parts = loss(prediction, tokens, now, Denominators.of(minibatch))
            assert value.isfinite() and parts
            numbers |= parts
    return numbers


@pytest.mark.parametrize(("algorithm", "settings"), VARIANTS)
def test_every_algorithm_reads_exactly_what_it_says(algorithm, settings):
    """With those fields it runs from credit to its losses; without any one of them it stops and names it."""
    reads = algorithm.reads(settings)
    assert set(reads) <= FIELDS
    empty = {
        name: None
        for name in ("logp_rollout", "logp_start", "logp_reference", "value", "score", "preference", "margin")
    }
    batch = full_batch()
    given = {name: getattr(batch, name) for name in reads}
    assert run(algorithm, settings, batch.replace(**(empty | given)))
    for name in {"score", "preference", "margin"} & set(reads):
        with pytest.raises(AssertionError, match=name):
            run(algorithm, settings, batch.replace(**(empty | given | {name: None})))


@pytest.mark.parametrize("algorithm", [PPO, GRPO, RLOO, REINFORCE_PLUS_PLUS])
def test_credit_asks_for_every_stage_that_it_reads(algorithm):
    settings, batch = algorithm.settings(), full_batch()
    for name in algorithm.reads(settings):
        with pytest.raises(AssertionError, match=name):
            algorithm.credit(batch.replace(**{name: None}), settings, algorithm.initial_state(settings))


def test_each_has_its_name_its_settings_and_a_model_to_train():
    assert set(ALGORITHMS) == {"ppo", "grpo", "rloo", "reinforce++", "dpo", "kto", "sft", "rm"}
    for name, algorithm in ALGORITHMS.items():
        assert algorithm.name == name and dataclasses.is_dataclass(algorithm.settings)
        assert algorithm.actor_loss or algorithm.critic_loss


def expected_reward(logits: torch.Tensor) -> float:
    """Arms pay 0, 0.25, 0.5, 0.75 and 1."""
    return float(logits.softmax(0) @ torch.linspace(0, 1, 5))


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (PPO, config.PPO(kl_coef=0.0, entropy_coef=0.001)),
        (PPO, config.PPO(kl_coef=0.0, policy_loss="penalty")),
        (GRPO, config.GRPO()),
        (GRPO, config.GRPO(group_std="none", loss_mean="fixed_length", loss_length=1, kl_coef=0.0)),
        (GRPO, config.GRPO(ratio="sequence_mean", num_epochs=2)),
        (RLOO, config.RLOO()),
        (REINFORCE_PLUS_PLUS, config.ReinforcePlusPlus()),
        (REINFORCE_PLUS_PLUS, config.ReinforcePlusPlus(baseline=True)),
    ],
)
def test_every_algorithm_with_samples_solves_a_bandit(algorithm, settings):
    """One-token responses over 5 arms from a policy of 5 logits; PPO's critic knows the value of the policy."""
    generator = torch.Generator().manual_seed(0)
    logits, reference = torch.zeros(5, requires_grad=True), torch.zeros(5).log_softmax(0)
    optimizer, state = torch.optim.Adam([logits], lr=0.1), algorithm.initial_state(settings)
    for _ in range(80):
        arms = torch.multinomial(logits.detach().softmax(0), 32, replacement=True, generator=generator)
        start = logits.detach().log_softmax(0)
        batch = experience_of(
            bools(*[[1]] * 32),
            group=torch.arange(8).repeat_interleave(4),
            score=arms / 4,
            logp_rollout=start[arms][:, None],
            logp_start=start[arms][:, None],
            logp_reference=reference[arms][:, None],
            value=torch.full((32, 1), expected_reward(logits.detach())),
        )
        now = algorithm.settings_now(settings, state)
        batch, state, _ = algorithm.credit(batch, settings, state)
        batch = algorithm.prepare_minibatch(batch, settings)
        for _ in range(settings.num_epochs):
            logp = logits.log_softmax(0)
            entropy = -(logp.exp() * logp).sum().expand(32)
            tokens = TokenBatch.from_experience(batch)
            loss, _ = algorithm.actor_loss(Prediction(logp[arms], entropy), tokens, now, Denominators.of(batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert expected_reward(logits.detach()) > 0.9


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [(DPO, config.DPO()), (DPO, config.DPO(loss="ipo")), (KTO, config.KTO()), (SFT, config.SFT())],
)
def test_every_algorithm_without_samples_prefers_the_better_arms(algorithm, settings):
    """All pairs of 5 arms, the higher-paid one preferred; KTO and SFT see the two best as desirable."""
    arms = torch.tensor([pair for high in range(5) for low in range(high) for pair in (high, low)])
    preference = torch.tensor([1.0, 0.0]).repeat(10) if algorithm is DPO else (arms >= 3).float()
    logits, reference = torch.zeros(5, requires_grad=True), torch.zeros(5).log_softmax(0)
    batch = experience_of(
        bools(*[[1]] * 20),
        group=torch.arange(10).repeat_interleave(2),
        preference=preference,
        margin=torch.zeros(20),
        logp_reference=reference[arms][:, None],
    )
    if algorithm is SFT:
        batch = batch.select((arms >= 3).nonzero()[:, 0])
        arms = arms[arms >= 3]
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(100):
        tokens = TokenBatch.from_experience(batch)
        prediction = Prediction(logits.log_softmax(0)[arms])
        loss, _ = algorithm.actor_loss(prediction, tokens, settings, Denominators.of(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert expected_reward(logits.detach()) > 0.8
