"""PPO with a critic, a reference and a trained reward model, each in its own layout, learns a toy task from nothing."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from megarlhf.config.layout import Layout
from megarlhf.config.settings import PPO, Actor, Critic, Data, Optimizer, PPORun, Reward, Rollout, Run
from tests.distributed.pool import run_on_ranks
from tests.learning.toy import ANSWER_TOKENS, metrics, train, train_reward_model, write_actor, write_prompts

STEPS = 30


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("toy")
    assert train_reward_model(root / "reward") < 0.1, "the reward model did not learn its task"
    write_actor(root / "actor")
    write_prompts(root / "prompts.jsonl")
    return root


def settings(toy: Path, folder: Path) -> PPORun:
    """Actor trained as two stages and sampled as two copies; critic and reward model smaller, over two tensor ranks."""
    return PPORun(
        actor=Actor(
            model=str(toy / "actor"),
            train=Layout(pp=2),
            optimizer=Optimizer(learning_rate=3e-3),
            micro_batch_tokens=128,
        ),
        critic=Critic(train=Layout(tp=2, sp=True), optimizer=Optimizer(learning_rate=3e-3), micro_batch_tokens=128),
        reward=Reward(model=str(toy / "reward"), train=Layout(tp=2)),
        algorithm=PPO(kl_coef=0.001, num_epochs=2, num_minibatches=2, missing_eos_penalty=0.0),
        rollout=Rollout(batch_size=32, max_new_tokens=ANSWER_TOKENS, min_new_tokens=ANSWER_TOKENS, max_slots=16),
        data=Data(prompts=str(toy / "prompts.jsonl"), max_prompt_tokens=8),
        run=Run(dir=str(folder), steps=STEPS, tensorboard=False),
    )


def test_ppo_learns_the_toy_task(toy, tmp_path):
    run_on_ranks(2, train, "ppo", settings(toy, tmp_path / "run"))
    rows = metrics(tmp_path / "run")
    scores = [row["objective/scores"] for row in rows]
    assert len(scores) == STEPS
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.3
    assert max(row["rollout/logp_gap_max"] for row in rows) < 1e-4
    AutoModelForCausalLM.from_pretrained(tmp_path / "run/hf")
