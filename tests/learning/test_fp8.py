"""PPO and GRPO learn the toy task while every linear of every model computes in emulated blockwise FP8."""

from dataclasses import replace

import pytest

from megarlhf.config.algorithms import GRPO
from megarlhf.config.layout import Layout
from megarlhf.config.precision import FP8
from megarlhf.config.runs import GRPORun
from tests.distributed.pool import run_on_ranks
from tests.learning.test_online import ROLLOUT, STEPS, with_toy
from tests.learning.test_ppo import settings as ppo_settings
from tests.learning.toy import metrics, train, train_reward_model, write_actor, write_prompts

EMULATED = {"layers": "emulated_fp8", "fp8": FP8("blockwise", "hybrid")}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    root = tmp_path_factory.mktemp("toy")
    assert train_reward_model(root / "reward") < 0.1, "the reward model did not learn its task"
    write_actor(root / "actor")
    write_prompts(root / "prompts.jsonl")
    return root


def in_fp8(section):
    return replace(section, **EMULATED)


def gain(folder) -> float:
    scores = [row["objective/scores"] for row in metrics(folder)]
    return sum(scores[-5:]) / 5 - sum(scores[:5]) / 5


def test_grpo_learns_in_fp8(toy, tmp_path):
    plain = GRPORun(algorithm=GRPO(kl_coef=0.001, num_epochs=2), rollout=ROLLOUT)
    settings = with_toy(plain, toy, Layout(tp=2), tmp_path / "run", STEPS, 3e-3)
    run_on_ranks(2, train, "grpo", replace(settings, actor=in_fp8(settings.actor)))
    assert gain(tmp_path / "run") > 0.3


def test_ppo_learns_in_fp8(toy, tmp_path):
    settings = ppo_settings(toy, tmp_path / "run")
    sections = {name: in_fp8(getattr(settings, name)) for name in ("actor", "critic", "reward")}
    run_on_ranks(2, train, "ppo", replace(settings, **sections))
    assert gain(tmp_path / "run") > 0.3
