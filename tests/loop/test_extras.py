"""What a run can have besides: adapters, a corpus mixed in, averages of the weights, sampling until groups differ."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarlhf.config.algorithms import GRPO, PPO
from megarlhf.config.layout import Layout
from megarlhf.config.lora import LoRA
from megarlhf.config.runs import GRPORun
from megarlhf.config.settings import (
    Actor,
    Critic,
    Data,
    Optimizer,
    PPORun,
    Pretraining,
    Reference,
    Reward,
    Rollout,
    Run,
)  # fmt: skip
from tests.distributed.pool import run_on_ranks
from tests.learning.toy import write_actor, write_prompts
from tests.tiny import write_llama


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("extras")
    write_actor(root / "actor")
    write_prompts(root / "prompts.jsonl", count=16)
    (root / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("abcabcabc", "xyzxyz")))
    return root


def grpo(toy: Path, folder: Path, **changes) -> GRPORun:
    """Group-relative: a policy of two stages, sampled as two copies."""
    settings = GRPORun(
        actor=Actor(model=str(toy / "actor"), train=Layout(pp=2), optimizer=Optimizer(learning_rate=1e-2)),
        reward=Reward(functions=("tests.loop.plugin:capitals",)),
        algorithm=GRPO(kl_coef=0.01),
        rollout=Rollout(batch_size=4, samples_per_prompt=4, max_new_tokens=8, min_new_tokens=8),
        data=Data(prompts=str(toy / "prompts.jsonl"), max_prompt_tokens=8),
        run=Run(dir=str(folder), steps=3, tensorboard=False),
    )
    return replace(settings, **changes)


def train(rank: int, world_size: int, command: str, settings) -> None:
    from megarlhf.loop.launch import run_training
    from megarlhf.loop.preflight import preflight

    assert preflight(settings, world_size) == []
    run_training(command, settings, rank, world_size)


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_adapters_are_trained_against_the_model_without_them(toy, tmp_path):
    settings = grpo(toy, tmp_path)
    settings = replace(settings, actor=replace(settings.actor, lora=LoRA(rank=4)))
    run_on_ranks(2, train, "grpo", settings)
    rows = metrics(tmp_path)
    assert rows[0]["objective/kl"] == pytest.approx(0, abs=1e-6) and rows[2]["objective/kl"] > 1e-4
    assert max(row["rollout/logp_gap_max"] for row in rows) < 1e-4, "the sampler did not have the adapters"
    before, after = load_file(toy / "actor/model.safetensors"), load_file(tmp_path / "hf/model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    adapters = load_file(tmp_path / "hf_lora/adapter_model.safetensors")
    weight = "model.layers.0.self_attn.q_proj"
    a, b = (adapters[f"base_model.model.{weight}.lora_{letter}.weight"] for letter in "AB")
    scale = LoRA().alpha / 4
    torch.testing.assert_close(after[f"{weight}.weight"], before[f"{weight}.weight"] + scale * b @ a)


def test_a_corpus_mixed_in_is_learnt_beside_the_reward(toy, tmp_path):
    corpus = Pretraining(path=str(toy / "corpus.jsonl"), coef=2.0, batch_size=2, max_tokens=32)
    grpo_settings = grpo(toy, tmp_path)
    settings = PPORun(
        actor=grpo_settings.actor,
        reward=grpo_settings.reward,
        algorithm=PPO(num_epochs=2),
        pretraining=corpus,
        rollout=grpo_settings.rollout,
        data=grpo_settings.data,
        run=replace(grpo_settings.run, steps=4),
    )
    run_on_ranks(2, train, "ppo", settings)
    rows = metrics(tmp_path)
    assert rows[-1]["pretraining/loss"] < 0.9 * rows[0]["pretraining/loss"]
    assert all("loss/policy_avg" in row for row in rows)


def test_the_critic_learns_alone_at_first(toy, tmp_path):
    def ppo(folder: Path, warmup: int) -> list[dict]:
        of = grpo(toy, folder)
        settings = PPORun(
            actor=of.actor,
            reward=of.reward,
            algorithm=PPO(critic_warmup_steps=warmup, num_epochs=2),
            rollout=of.rollout,
            data=of.data,
            run=of.run,
        )
        run_on_ranks(2, train, "ppo", settings)
        return metrics(folder)

    alone, together = ppo(tmp_path / "alone", 2), ppo(tmp_path / "together", 0)
    assert ["loss/policy_avg" in row for row in alone] == [False, False, True]
    assert all("loss/value_avg" in row for row in alone) and alone[0]["loss/value_avg"] == together[0]["loss/value_avg"]
    assert [row["objective/kl"] for row in alone] == pytest.approx([0, 0, 0], abs=1e-6), "the policy moved"
    assert together[2]["objective/kl"] > 1e-4
    start, end = load_file(toy / "actor/model.safetensors"), load_file(tmp_path / "alone/hf/model.safetensors")
    assert not torch.equal(start["model.norm.weight"], end["model.norm.weight"]), "it never began"


def test_averages_follow_the_actor(toy, tmp_path):
    settings = grpo(toy, tmp_path, reference=Reference(follow_rate=0.5))
    settings = replace(settings, actor=replace(settings.actor, average_decay=0.5))
    run_on_ranks(2, train, "grpo", settings)
    start, end = load_file(toy / "actor/model.safetensors"), load_file(tmp_path / "hf/model.safetensors")
    average = load_file(tmp_path / "hf_average/model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    to_start, to_end = (average[name] - start[name]).norm(), (average[name] - end[name]).norm()
    assert 0 < to_end < to_start, "an average of decay 0.5 is nearer to the end than to the start"
    still = tmp_path / "still"
    run_on_ranks(2, train, "grpo", grpo(toy, still))
    assert metrics(tmp_path)[2]["objective/kl"] < metrics(still)[2]["objective/kl"], "the reference did not follow"


def test_an_average_of_adapters_holds_adapters_only(toy, tmp_path):
    settings = grpo(toy, tmp_path)
    actor = replace(settings.actor, lora=LoRA(rank=2), average_decay=0.5)
    sizes = run_on_ranks(2, averaged_bytes, replace(settings, actor=actor))
    weights = sum(tensor.nbytes for tensor in load_file(toy / "actor/model.safetensors").values())
    assert max(sizes) < 0.2 * weights
    run_on_ranks(2, train, "grpo", replace(settings, actor=actor))
    start, end, average = (
        load_file(path / "model.safetensors") for path in (toy / "actor", tmp_path / "hf", tmp_path / "hf_average")
    )
    name = "model.layers.1.mlp.down_proj.weight"
    assert 0 < (average[name] - end[name]).norm() < (average[name] - start[name]).norm()
    assert torch.equal(average["model.norm.weight"], start["model.norm.weight"])


def averaged_bytes(rank: int, world_size: int, settings) -> int:
    from megarlhf.algorithms.catalogue import ALGORITHMS
    from megarlhf.loop.online import build_online
    from megarlhf.telemetry.report import Reporter

    (follower,) = build_online(settings, ALGORITHMS["grpo"], world_size, Reporter(())).followers
    return follower.average.num_bytes


def test_prompts_without_signal_are_replaced(toy, tmp_path):
    reward = Reward(functions=("tests.loop.plugin:capitals_after_a_to_m",))
    plain, dynamic = grpo(toy, tmp_path / "plain", reward=reward), grpo(toy, tmp_path / "dynamic", reward=reward)
    dynamic = replace(dynamic, rollout=replace(dynamic.rollout, extra_rounds=4))
    for settings in (plain, dynamic):
        run_on_ranks(2, train, "grpo", settings)
    without = [row["rollout/groups_without_signal"] for row in metrics(tmp_path / "dynamic")]
    assert sum(without) > 0
    samples = [json.loads(line) for line in (tmp_path / "dynamic/samples.jsonl").read_text().splitlines()]
    assert all(row["prompt"][0] <= "m" for row in samples), "a group without signal was trained on"
    assert [row["episode"] for row in metrics(tmp_path / "dynamic")] == [16, 32, 48]


def test_a_critic_on_another_scale_than_its_rewards_is_told(single_rank, toy, tmp_path, caplog):
    """The reward model's head gives raw scores, of which rewards are the normalised ones."""
    from megarlhf.algorithms.catalogue import ALGORITHMS
    from megarlhf.loop.online import build_online
    from megarlhf.telemetry.report import Reporter

    judge = write_llama(tmp_path / "judge", num_labels=1, megarlhf_score_mean=[3.0], megarlhf_score_std=[0.25])

    settings = PPORun(
        actor=Actor(model=str(toy / "actor")),
        reward=Reward(model=str(judge)),
        data=Data(prompts=str(toy / "prompts.jsonl"), max_prompt_tokens=8),
        run=Run(dir=str(tmp_path / "run"), steps=3, tensorboard=False),
    )

    def is_told(**changes) -> bool:
        caplog.clear()
        build_online(replace(settings, **changes), ALGORITHMS["ppo"], 1, Reporter(()))
        return "scores have mean 3 and deviation 0.25" in caplog.text

    assert is_told()
    assert not is_told(reward=Reward(model=str(judge), normalise=False))
    assert not is_told(algorithm=PPO(critic_warmup_steps=1))
    assert not is_told(critic=Critic(new_head="always")) and not is_told(critic=Critic(model=str(toy / "actor")))
