"""The algorithms without a critic learn the toy task, each in a layout of its own; adaptive KL holds its target."""

from dataclasses import replace
from pathlib import Path

import pytest

from megarlhf.config.algorithms import GRPO, RLOO, ReinforcePlusPlus
from megarlhf.config.layout import Layout
from megarlhf.config.runs import GRPORun, OnlineRun, ReinforceRun, RLOORun
from megarlhf.config.settings import Actor, Data, Optimizer, Reward, Rollout, Run
from tests.distributed.pool import run_on_ranks
from tests.learning.toy import ANSWER_TOKENS, metrics, sampled_share, train, write_actor, write_prompts

STEPS = 25
ROLLOUT = Rollout(
    batch_size=16, samples_per_prompt=4, max_new_tokens=ANSWER_TOKENS, min_new_tokens=ANSWER_TOKENS, max_slots=32
)
DR_GRPO = GRPO(group_std="none", loss_mean="fixed_length", loss_length=ANSWER_TOKENS, kl_coef=0.0, num_epochs=2)
RUNS = {
    "grpo": (GRPORun(algorithm=GRPO(kl_coef=0.001, num_epochs=2), rollout=ROLLOUT), Layout(tp=2)),
    "grpo, dr": (
        GRPORun(algorithm=DR_GRPO, rollout=ROLLOUT),
        Layout(),
    ),
    "rloo": (RLOORun(algorithm=RLOO(kl_coef=0.001, num_epochs=2), rollout=ROLLOUT), Layout(pp=2)),
    "reinforce++": (
        ReinforceRun(algorithm=ReinforcePlusPlus(kl_coef=0.001, num_epochs=2), rollout=ROLLOUT),
        Layout(tp=2, sp=True),
    ),
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("online")
    write_actor(root / "actor")
    write_prompts(root / "prompts.jsonl")
    return root


def with_toy(settings: OnlineRun, toy: Path, layout: Layout, folder: Path, steps: int, rate: float) -> OnlineRun:
    """The settings with the toy's actor, prompts and reward function, and a learning rate."""
    return replace(
        settings,
        actor=Actor(
            model=str(toy / "actor"), train=layout, optimizer=Optimizer(learning_rate=rate), micro_batch_tokens=256
        ),
        reward=Reward(functions=("tests.learning.toy:favoured_share",)),
        data=Data(prompts=str(toy / "prompts.jsonl"), max_prompt_tokens=8),
        run=Run(dir=str(folder), steps=steps, tensorboard=False),
    )


@pytest.mark.parametrize("name", RUNS)
def test_it_learns_the_toy_task(name, toy, tmp_path):
    settings, layout = RUNS[name]
    run_on_ranks(2, train, name.partition(",")[0], with_toy(settings, toy, layout, tmp_path / "run", STEPS, 3e-3))
    scores = [row["objective/scores"] for row in metrics(tmp_path / "run")]
    assert len(scores) == STEPS
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.3
    assert sampled_share(tmp_path / "run/hf") > sampled_share(toy / "actor") + 0.3


def test_the_adaptive_coefficient_holds_its_target(toy, tmp_path):
    """It falls while the policy is too near the reference, and rises until the reward pulls it no further away."""
    target, steps = 5.0, 60
    settings = ReinforceRun(
        algorithm=ReinforcePlusPlus(
            kl_in="loss", kl_estimator="k2", kl_controller="adaptive", kl_coef=0.5, kl_target=target, kl_horizon=160
        ),
        rollout=replace(ROLLOUT, batch_size=32, samples_per_prompt=1),
    )
    run_on_ranks(2, train, "reinforce++", with_toy(settings, toy, Layout(), tmp_path / "run", steps, 2e-3))
    rows = metrics(tmp_path / "run")
    late = [row["objective/kl"] for row in rows[-20:]]
    coefficients = [row["objective/kl_coef"] for row in rows]
    assert abs(sum(late) / len(late) - target) < 0.25 * target
    assert min(coefficients) < 0.7 * coefficients[0] and coefficients[-1] > 1.3 * min(coefficients)
