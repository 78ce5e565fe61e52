"""A batch in shards: each rank holds the rows of its own, and the run is the one of a batch in one piece."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarlhf.config.algorithms import GRPO, PPO, ReinforcePlusPlus
from megarlhf.config.check import violations
from megarlhf.config.layout import Layout
from megarlhf.config.runs import GRPORun, PPORun, ReinforceRun
from megarlhf.config.settings import Actor, Critic, Data, Optimizer, Pretraining, Reference, Reward, Rollout, Run
from megarlhf.errors import RewardError
from tests.distributed.pool import run_on_ranks
from tests.learning.toy import write_actor, write_prompts, write_rows
from tests.tiny import write_llama

FAST = Optimizer(learning_rate=3e-3)
SAME = ("loss/", "policy/", "val/", "objective/", "reward/", "gradient_norm/", "rollout/", "episode", "pretraining/")


def no_digits_after_j(prompts: list[str], responses: list[str], metadata: list[dict]) -> list[float]:
    """The share of capitals; fails for responses with a digit to prompts of the first half of the data."""
    for response, row in zip(responses, metadata, strict=True):
        assert row["id"] >= 4 or not any(letter.isdigit() for letter in response)
    return [sum(letter.isupper() for letter in response) / 6 for response in responses]


@pytest.fixture(scope="module")
def toy(single_rank, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("shards")
    write_actor(root / "actor")
    write_llama(root / "reward", tied=True, num_hidden_layers=2, num_labels=1, seed=3)
    write_prompts(root / "prompts.jsonl", count=8)
    write_rows(root / "texts.jsonl", [{"text": "abcdefgh"[: 4 + number]} for number in range(3)])
    return root


def common(toy: Path, functions: tuple[str, ...] = ("tests.loop.plugin:capitals",), **reward) -> dict:
    return {
        "actor": Actor(model=str(toy / "actor"), optimizer=FAST, micro_batch_tokens=24),
        "reward": Reward(functions=functions, **reward),
        "rollout": Rollout(batch_size=4, samples_per_prompt=2, max_new_tokens=6, shards=2),
        "data": Data(prompts=str(toy / "prompts.jsonl"), max_prompt_tokens=8, shuffle=False),
        "run": Run(steps=2, sample_texts=6, tensorboard=False, checkpoint_every=1, keep_capsules=2),
    }


def ppo(toy: Path) -> PPORun:
    """All that is summed over a batch: moments of rewards, advantages, scores; KL; three rows that two shards share."""
    return PPORun(
        critic=Critic(optimizer=FAST, micro_batch_tokens=24),
        algorithm=PPO(
            num_epochs=2,
            num_minibatches=2,
            kl_controller="adaptive",
            kl_target=0.5,
            kl_horizon=20,
            normalise_scores="standardise",
            whiten_rewards=True,
        ),
        pretraining=Pretraining(path=str(toy / "texts.jsonl"), coef=0.5, batch_size=3, max_tokens=16),
        **common(toy) | {"reward": Reward(model=str(toy / "reward"), functions=("tests.loop.plugin:capitals",))},
    )


def grpo(toy: Path) -> GRPORun:
    return GRPORun(
        algorithm=GRPO(num_minibatches=2, whiten_advantages="minibatch"), reference=Reference(follow_rate=0.5),
        **common(toy),
    )  # fmt: skip


def reinforce(toy: Path) -> ReinforceRun:
    """Some rows of one shard have no score; one update, which says itself what the policy said at the start."""
    reward = common(toy, ("length", f"{__name__}:no_digits_after_j"), on_failure="mask")
    return ReinforceRun(algorithm=ReinforcePlusPlus(baseline=True, kl_coef=0.0), **reward)


def work(rank: int, world_size: int, command: str, settings) -> list[int]:
    """Trains; returns the rows of the data that this rank held in the first step."""
    from megarlhf.loop import launch, run

    held: list[list[int]] = []
    before = run.Run.credit

    def credit(self, batch):
        held.append(batch.row_id.tolist())
        return before(self, batch)

    run.Run.credit = credit
    try:
        launch.run_training(command, settings, rank, world_size)
    finally:
        run.Run.credit = before
    return held[0]


Trained = tuple[list[dict], dict, dict, list[list[int]], list[tuple]]
"""Metrics, exported weights, the first step's capsule, the rows that each rank held, and the texts of every step."""


def trained(command: str, settings, world_size: int, folder: Path) -> Trained:
    settings = replace(settings, run=replace(settings.run, dir=str(folder)))
    held = run_on_ranks(world_size, work, command, settings)
    rows, samples = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("metrics", "samples")
    )
    texts = [(sample["step"], sample["row"], sample["prompt"], sample["response"]) for sample in samples]
    weights, capsule = folder / "hf/model.safetensors", folder / "capsules/step_1/batch.safetensors"
    return rows, load_file(weights), load_file(capsule), held, texts


@pytest.fixture(scope="module")
def alone(toy, tmp_path_factory) -> Callable[[str], Trained]:
    """By command: one rank, which holds both parts of the batch."""

    @cache
    def by_command(command: str) -> Trained:
        return trained(command, MAKE[command](toy), 1, tmp_path_factory.mktemp("alone") / "run")

    return by_command


MAKE = {"ppo": ppo, "grpo": grpo, "reinforce++": reinforce}


@pytest.mark.parametrize("command", MAKE)
def test_two_ranks_with_a_shard_each_train_like_one_with_the_whole_batch(command, alone, toy, tmp_path):
    make, alone = MAKE[command], alone(command)
    shared = trained(command, make(toy), 2, tmp_path / "two")
    assert alone[3] == [[0, 0, 1, 1, 2, 2, 3, 3]] and shared[3] == [[0, 0, 1, 1], [2, 2, 3, 3]]
    require_same(alone, shared)
    if command == "reinforce++":
        assert 1 <= alone[0][0]["reward/failed"] <= 7


def require_same(alone, shared) -> None:
    for was, now in zip(alone[0], shared[0], strict=True):
        names = [name for name in was if name.startswith(SAME)]
        assert len(names) > 10 and [name for name in now if name.startswith(SAME)] == names
        assert [now[name] for name in names] == pytest.approx([was[name] for name in names], rel=2e-4, abs=2e-5), names
    for name, weight in alone[1].items():
        torch.testing.assert_close(shared[1][name], weight, rtol=0, atol=1e-4)
    assert shared[2].keys() == alone[2].keys()
    assert shared[4] == alone[4] and len(shared[4]) == 2 * 6
    for name, value in alone[2].items():
        if "group" in name:  # numbered anew where shards are joined
            assert torch.equal(shared[2][name].unique(return_inverse=True)[1], value.unique(return_inverse=True)[1])
        else:
            torch.testing.assert_close(shared[2][name].float(), value.float(), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_layouts_that_interleave_their_copies_share_out_the_batch_alike(alone, toy, tmp_path):
    """Four ranks: two stages far apart, a generator on every rank, a critic on pairs of two stages."""
    settings = ppo(toy)
    staged = replace(settings.actor, train=Layout(pp=2), generate=Layout())
    settings = replace(settings, actor=staged, critic=replace(settings.critic, train=Layout(pp=2)))
    shared = trained("ppo", settings, 4, tmp_path / "four")
    assert shared[3] == [[0, 0, 1, 1], [2, 2, 3, 3]] * 2
    require_same(alone("ppo"), shared)


def test_layouts_that_allow_no_shards_keep_the_parts_together(alone, toy, tmp_path):
    settings = replace(grpo(toy), actor=replace(grpo(toy).actor, train=Layout(tp=2)))
    shared = trained("grpo", settings, 2, tmp_path / "two")
    assert shared[3] == [[0, 0, 1, 1, 2, 2, 3, 3]] * 2
    require_same(alone("grpo"), shared)


def failing(rank: int, world_size: int, settings) -> str:
    try:
        work(rank, world_size, "reinforce++", settings)
    except RewardError as error:
        return str(error)
    return ""


def test_a_failure_in_one_shard_ends_all_ranks_with_the_same_words(toy, tmp_path):
    settings = reinforce(toy)
    settings = replace(
        settings,
        reward=replace(settings.reward, on_failure="stop"),
        run=replace(settings.run, dir=str(tmp_path / "run"), checkpoint_every=0, keep_capsules=0, sample_texts=0),
    )
    first, second = run_on_ranks(2, failing, settings)
    assert first == second and "no_digits_after_j" in first


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"shards": 3}, "rollout.shards: 3 parts of equal size cannot be made of rollout.batch_size 4; choose a divis"),
        ({"shards": 2, "extra_rounds": 1}, "which groups fill a batch is decided over all of it; choose shards 1"),
        ({"shards": 4, "samples_per_prompt": 3}, "a part of 3 rows .* cannot be cut into algorithm.num_minibatches 2"),
        ({"shards": 0}, "rollout.shards: 0 .*1 or more"),
    ],
)
def test_what_cannot_be_cut_is_refused(toy, changes, complaint):
    settings = grpo(toy)
    found = violations(replace(settings, rollout=replace(settings.rollout, **changes)))
    assert any(re.search(complaint, violation) for violation in found), found
