"""A run goes on without the responses that could not be scored: counted, trained on nothing, the same on all ranks."""

import json
from dataclasses import replace

import pytest

from megarlhf.config.algorithms import PPO
from megarlhf.config.settings import Actor, Data, Optimizer, PPORun, Reward, Rollout, Run
from megarlhf.errors import RewardError
from tests.distributed.pool import run_on_ranks
from tests.learning.toy import write_actor, write_prompts


def no_digits(prompts, responses, metadata):
    """The share of capitals; fails for responses with a digit."""
    assert not any(letter.isdigit() for response in responses for letter in response)
    return [sum(letter.isupper() for letter in response) / 6 for response in responses]


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> PPORun:
    root = tmp_path_factory.mktemp("masked")
    write_actor(root / "actor")
    write_prompts(root / "prompts.jsonl", count=8)
    return PPORun(
        actor=Actor(model=str(root / "actor"), optimizer=Optimizer(learning_rate=1e-3)),
        reward=Reward(functions=("length", f"{__name__}:no_digits"), on_failure="mask"),
        algorithm=PPO(num_epochs=1),
        rollout=Rollout(batch_size=8, max_new_tokens=6),
        data=Data(prompts=str(root / "prompts.jsonl"), max_prompt_tokens=8),
        run=Run(steps=2, sample_texts=0, tensorboard=False),
    )


def run_on_rank(rank: int, world_size: int, settings: PPORun) -> str:
    from megarlhf.loop.launch import run_training

    try:
        run_training("ppo", settings, rank, world_size)
    except RewardError as error:
        return str(error)
    return ""


def metrics_of(settings: PPORun, world_size: int, folder) -> list[dict]:
    settings = replace(settings, run=replace(settings.run, dir=str(folder)))
    assert run_on_ranks(world_size, run_on_rank, settings) == [""] * world_size
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_ranks_leave_the_same_responses_out(settings, tmp_path):
    alone, shared = metrics_of(settings, 1, tmp_path / "one"), metrics_of(settings, 2, tmp_path / "two")
    assert 1 <= alone[0]["reward/failed"] <= 7
    assert all(row["gradient_norm/actor"] > 0 for row in alone)
    for name in ("reward/failed", "reward/length", "reward/no_digits", "objective/scores", "gradient_norm/actor"):
        assert [row[name] for row in shared] == pytest.approx([row[name] for row in alone], rel=1e-4), name


def test_stop_ends_the_run_on_every_rank_with_the_same_words(settings, tmp_path):
    stopping = replace(settings, reward=replace(settings.reward, on_failure="stop"))
    found = run_on_ranks(2, run_on_rank, replace(stopping, run=replace(settings.run, dir=str(tmp_path / "run"))))
    assert found[0] == found[1] and "AssertionError" in found[0]
