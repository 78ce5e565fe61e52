"""Whole runs with layers te: what they report is what the emulation reports, and stopped ones go on bit for bit."""

import random
from pathlib import Path

import pytest

from megarlhf.config.algorithms import PPO
from megarlhf.config.corpus import Corpus
from megarlhf.config.layout import Layout
from megarlhf.config.precision import FP8
from megarlhf.config.runs import RewardModelRun
from megarlhf.config.settings import (
    Actor,
    CorpusRun,
    Critic,
    Data,
    Optimizer,
    PPORun,
    Reward,
    RewardTrainee,
    Rollout,
    Run,
)
from tests.distributed.pool import run_on_ranks
from tests.learning.toy import ANSWER_TOKENS, answer, random_prompt, train, write_prompts, write_rows
from tests.loop.test_resume import launches, numbers, stopped_often, tensors
from tests.tiny import write_llama
from tests.transformer_engine_cpu.test_models import SIZES

BLOCKWISE = FP8("blockwise", num_layers_at_end_in_bf16=1)
STEPS = 2


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("te_runs")
    write_llama(root / "actor", tied=True, num_hidden_layers=2, **SIZES)
    write_llama(root / "reward", tied=True, num_hidden_layers=2, num_labels=1, seed=3, **SIZES)
    write_prompts(root / "prompts.jsonl", 8)
    rng = random.Random(0)
    pairs = [(random_prompt(rng), answer(rng, ANSWER_TOKENS), answer(rng, 0)) for _ in range(2 * STEPS)]
    write_rows(root / "pairs.jsonl", [{"prompt": prompt, "chosen": a, "rejected": b} for prompt, a, b in pairs])
    return root


def ppo(toy: Path, folder: Path, layers: str = "te") -> PPORun:
    """All four models in FP8, weights in bfloat16, sampling in another layout than training."""
    kind = {"layers": layers, "fp8": BLOCKWISE, "dtype": "bfloat16"}
    fast = Optimizer(learning_rate=1e-3)
    return PPORun(
        actor=Actor(model=str(toy / "actor"), train=Layout(tp=2, sp=True), optimizer=fast, **kind),
        critic=Critic(optimizer=fast, **kind),
        reward=Reward(model=str(toy / "reward"), **kind),
        algorithm=PPO(num_epochs=1),
        rollout=Rollout(batch_size=4, max_new_tokens=4),
        data=Data(prompts=str(toy / "prompts.jsonl"), max_prompt_tokens=8),
        run=Run(dir=str(folder), steps=STEPS, checkpoint_every=STEPS, tensorboard=False),
    )


def train_te(rank: int, world_size: int, command: str, settings) -> None:
    train(rank, world_size, command, settings)


def launches_te(rank: int, world_size: int, command: str, settings) -> int:
    return launches(rank, world_size, command, settings)


def test_a_run_reports_what_the_emulation_does_and_goes_on_after_a_stop_with_the_same_bits(toy, tmp_path):
    run_on_ranks(2, train_te, "ppo", ppo(toy, tmp_path / "te"))
    run_on_ranks(2, train_te, "ppo", ppo(toy, tmp_path / "emulated", "emulated_fp8"))
    ours, theirs = (numbers(tmp_path / name)[0] for name in ("te", "emulated"))
    assert ours["rollout/logp_gap_max"] > 0 and ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert_goes_on("ppo", ppo(toy, tmp_path), tmp_path)


def assert_goes_on(command: str, settings, root: Path) -> None:
    """Stopped after every step, the run ends with the bits of the one in `root`/te."""
    parts = stopped_often(settings, root / "parts")
    assert run_on_ranks(2, launches_te, command, parts) == [STEPS] * 2
    assert numbers(root / "parts") == numbers(root / "te")
    expected, found = tensors(root / "te", STEPS), tensors(root / "parts", STEPS)
    assert expected.keys() == found.keys() and any("exp_avg_sq" in name for name in found)
    assert not [name for name in expected if not expected[name].equal(found[name])]


def test_delayed_scaling_goes_on_with_its_scales(toy, tmp_path):
    delayed = FP8("delayed", "hybrid", force_delayed=True)
    reward = RewardTrainee(
        model=str(toy / "reward"), train=Layout(tp=2), optimizer=Optimizer(learning_rate=1e-3), layers="te", fp8=delayed
    )
    settings = RewardModelRun(
        reward=reward,
        data=Corpus(path=str(toy / "pairs.jsonl"), batch_size=2, max_tokens=16, epochs=1),
        run=CorpusRun(dir=str(tmp_path / "te"), checkpoint_every=2, tensorboard=False),
    )
    run_on_ranks(2, train_te, "rm", settings)
    assert_goes_on("rm", settings, tmp_path)
