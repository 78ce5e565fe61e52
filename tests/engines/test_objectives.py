"""The gradient of every loss of the catalogue is the same under every layout, micro-batch size and packing, and the one
of rows that are computed each by itself, without sharing the prompt of their group."""

from dataclasses import dataclass

import pytest
import torch

from megarlhf.algorithms.catalogue import ALGORITHMS
from megarlhf.config.algorithms import (
    DPO,
    GRPO,
    KTO,
    PPO,
    RLOO,
    SFT,
    ReinforcePlusPlus,
    RewardModelling,
)
from megarlhf.config.layout import Layout
from megarlhf.config.settings import Optimizer
from megarlhf.records.experience import Experience, scatter_rows
from tests.distributed.pool import run_on_ranks
from tests.engines.layouts import assemble, every_row_whole, frozen_batch, tensors_by_name
from tests.engines.test_learner import build_learner
from tests.tiny import write_llama

LAYOUTS = {
    "one rank": (1, Layout(), 4096),
    "tp2": (2, Layout(tp=2), 4096),
    "tp2+sp, small micro-batches": (2, Layout(tp=2, sp=True), 32),
    "pp2": (2, Layout(pp=2), 4096),
    "pp2, small micro-batches": (2, Layout(pp=2), 32),
    "cp2": (2, Layout(cp=2), 4096),
    "cp2, small micro-batches": (2, Layout(cp=2), 32),
    "dp2": (2, Layout(), 4096),
    "dp2, small micro-batches": (2, Layout(), 32),
    "one row or group a micro-batch": (1, Layout(), 1),
    "small micro-batches": (1, Layout(), 32),
}
GROUPS = [0, 1, 0, 2, 1, 3, 0, 2, 3, 1]
"""Four prompts with two or three answers each, whose rows do not lie together. One answer has a single token."""
PREFERENCES = [1.0, -1.0, 0.0, 1.0, -3.0, 0.0, 2.0, 0.0, 1.0, -2.0]


@dataclass(frozen=True)
class Case:
    """A loss: an algorithm under some settings, read at some tokens, by a model with some head (`labels`: a value head
    with three)."""

    algorithm: str
    settings: object
    head: str = "vocabulary"
    mask: str = "response"
    is_mixed: bool = False
    """The same rows' SFT loss is added as a second part with its own denominators, as for a pretraining mix."""


CASES = {
    "ppo": Case("ppo", PPO()),
    "ppo, other bounds, dual clip": Case("ppo", PPO(clip_low=0.01, clip_high=0.02, dual_clip=1.01)),
    "ppo, penalty": Case("ppo", PPO(policy_loss="penalty")),
    "ppo, entropy bonus": Case("ppo", PPO(entropy_coef=0.1)),
    "ppo, k1 in loss": Case("ppo", PPO(kl_in="loss", kl_estimator="k1")),
    "ppo, k2 in loss": Case("ppo", PPO(kl_in="loss", kl_estimator="k2")),
    "ppo, k3 in loss": Case("ppo", PPO(kl_in="loss", kl_estimator="k3")),
    "ppo, truncated importance sampling": Case("ppo", PPO(importance_cap=1.02)),
    "ppo, whitened over the minibatch": Case("ppo", PPO(whiten_advantages="minibatch")),
    "ppo, sequence means": Case("ppo", PPO(loss_mean="sequence")),
    "ppo, mixed with sft": Case("ppo", PPO(), is_mixed=True),
    "ppo, critic": Case("ppo", PPO(), "value"),
    "ppo, critic without clip": Case("ppo", PPO(value_clip=0.0), "value"),
    "grpo": Case("grpo", GRPO()),
    "grpo, dr": Case("grpo", GRPO(group_std="none", loss_mean="fixed_length", loss_length=8)),
    "grpo, dapo": Case("grpo", GRPO(clip_high=0.28, loss_mean="token", kl_coef=0.0)),
    "grpo, gspo": Case("grpo", GRPO(ratio="sequence_mean", clip_low=3e-4, clip_high=4e-4)),
    "rloo": Case("rloo", RLOO()),
    "rloo, peer deviation": Case("rloo", RLOO(divide_by_peer_std=True)),
    "reinforce++": Case("reinforce++", ReinforcePlusPlus()),
    "reinforce++, baseline": Case("reinforce++", ReinforcePlusPlus(baseline=True)),
    "dpo": Case("dpo", DPO()),
    "dpo, label smoothing and sft term": Case("dpo", DPO(label_smoothing=0.1, sft_coef=0.5)),
    "dpo, ipo": Case("dpo", DPO(loss="ipo")),
    "dpo, per token": Case("dpo", DPO(length_normalised=True)),
    "kto": Case("kto", KTO(undesirable_weight=1.5)),
    "sft": Case("sft", SFT()),
    "sft, sequence means": Case("sft", SFT(loss_mean="sequence")),
    "rm": Case("rm", RewardModelling(), "value", "last"),
    "rm, all options": Case(
        "rm", RewardModelling(label_smoothing=0.1, margins=True, centring_coef=0.01), "value", "last"
    ),
    "rm, per token": Case("rm", RewardModelling(read_at="divergence"), "value"),
    "rm, regression": Case("rm", RewardModelling(loss="regression"), "value", "last"),
    "rm, several scores": Case("rm", RewardModelling(loss="regression", attributes=("a", "b", "c")), "labels", "last"),
}


def batch_of(case: Case, scored: Experience) -> Experience:
    """The minibatch as the loss of `case` is given it; the same on every rank."""
    algorithm, last = ALGORITHMS[case.algorithm], torch.arange(scored.mask.shape[1]) == scored.lengths[:, None] - 2
    batch = scored.replace(mask=last) if case.mask == "last" else scored
    if case.algorithm == "kto":
        return batch.replace(preference=(batch.preference > 0).float(), margin=torch.full((batch.num_rows,), 0.3))
    if algorithm.credit is not None:
        credited, *_ = algorithm.credit(batch, case.settings, algorithm.initial_state(case.settings))
        batch = credited.select(range(8))  # a minibatch of it
    return algorithm.prepare_minibatch(batch, case.settings)


def several_scores(num_rows: int) -> torch.Tensor:
    """[rows, 3], a third of them missing."""
    generator = torch.Generator().manual_seed(2)
    found = torch.randn(num_rows, 3, generator=generator)
    return found.masked_fill(torch.rand(num_rows, 3, generator=generator) < 0.33, torch.nan)


def scored_batch(rank: int, world_size: int, folders: dict[str, str]) -> Experience:
    """Ragged rows whose log-probs and values are those of the models, with noise, so that ratios are near 1."""
    from megarlhf.engines.scorer import LogprobScorer, ValueScorer

    batch = frozen_batch(num_rows=len(GROUPS), seed=5, groups=GROUPS).replace(
        preference=torch.tensor(PREFERENCES),
        margin=0.1 * torch.arange(len(GROUPS), dtype=torch.float32),
        attributes=several_scores(len(GROUPS)),
    )
    actor, critic = (
        build_learner(1, Layout(), folders[head], head, 4096, Optimizer()).model for head in ("vocabulary", "value")
    )
    batch = LogprobScorer(actor, "logp_start", 1.0, 4096).annotate(batch)
    batch = ValueScorer(critic, 4096).annotate(batch)
    generator = torch.Generator().manual_seed(1)

    def near(values: torch.Tensor, distance: float) -> torch.Tensor:
        noise = distance * torch.randn(int(batch.mask.sum()), generator=generator)
        return scatter_rows((values[batch.mask] + noise).split(batch.mask.sum(1).tolist()), batch.mask)

    return batch.replace(
        logp_rollout=near(batch.logp_start, 0.02),
        logp_reference=near(batch.logp_start, 0.2),
        value=near(batch.value, 0.3),
        logp_start=near(batch.logp_start, 0.02),
    )


def kind_of(head: str) -> str:
    return "value" if head == "labels" else head


def gradients(rank: int, world_size: int, layout: Layout, max_tokens: int, folders: dict[str, str], scored: Experience):
    """{case: gradient pieces} of every case, by a learner for each head."""
    from megarlhf.engines.learner import Part
    from megarlhf.loop.objectives import objective

    learners = {
        head: build_learner(world_size, layout, folders[head], kind_of(head), max_tokens, Optimizer())
        for head in folders
    }
    found = {}
    for name, case in CASES.items():
        learner = learners[case.head]
        parts = [Part(batch_of(case, scored), objective(ALGORITHMS[case.algorithm], case.settings, kind_of(case.head)))]
        parts += [Part(scored, objective(ALGORITHMS["sft"], SFT(), case.head))] if case.is_mixed else []
        learner.accumulate(parts, complete_gradients=True)
        found[name] = tensors_by_name(learner.model, lambda parameter: parameter.main_grad)
    return found


def gradients_of_whole_rows(rank: int, world_size: int, folders: dict[str, str], scored: Experience):
    with every_row_whole():
        return gradients(rank, world_size, Layout(), 4096, folders, scored)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("objectives")
    return {
        "vocabulary": str(write_llama(root / "tied", tied=True)),
        "value": str(write_llama(root / "value", num_labels=1)),
        "labels": str(write_llama(root / "labels", num_labels=3)),
    }


@pytest.fixture(scope="module")
def scored(folders) -> Experience:
    return run_on_ranks(1, scored_batch, folders)[0]


@pytest.fixture(scope="module")
def one_process(folders, scored) -> dict[str, dict[str, torch.Tensor]]:
    """The gradients of one rank that sees all rows at once, each whole, by case."""
    (found,) = run_on_ranks(1, gradients_of_whole_rows, folders, scored)
    return {name: assemble([pieces]) for name, pieces in found.items()}


def norm(tensors: dict[str, torch.Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors.values()) ** 0.5


def test_every_algorithm_of_the_catalogue_has_a_case():
    assert {case.algorithm for case in CASES.values()} == set(ALGORITHMS)
    assert all(isinstance(case.settings, ALGORITHMS[case.algorithm].settings) for case in CASES.values())


def test_every_option_changes_the_gradient(one_process):
    """Otherwise its case would show nothing."""
    for name, found in one_process.items():
        assert norm(found) > 1e-4, name
        kind = (CASES[name].algorithm, CASES[name].head)
        for other in [other for other, case in CASES.items() if (case.algorithm, case.head) == kind and other != name]:
            difference = {key: found[key] - one_process[other][key] for key in found}
            assert norm(difference) > 1e-4 * norm(found), f"{name} is {other}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_gradient_depends_on_the_layout_or_the_micro_batches(layout, folders, scored, one_process):
    world_size, chosen, max_tokens = LAYOUTS[layout]
    ranks = run_on_ranks(world_size, gradients, chosen, max_tokens, folders, scored)
    far = {}
    for name, expected in one_process.items():
        found = assemble([rank[name] for rank in ranks])
        assert expected.keys() == found.keys()
        distance = norm({key: expected[key] - found[key] for key in expected}) / norm(expected)
        if not distance <= 1e-5:
            far[name] = distance
    assert not far
