"""A step with one update takes its start log-probs from that update; and its profile says where its time went."""

import gzip
import json
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from megarlhf.config.algorithms import GRPO
from megarlhf.config.layout import Layout
from megarlhf.config.runs import GRPORun, update_says_start
from megarlhf.config.settings import Actor, Data, Optimizer, Reward, Rollout, Run
from tests.distributed.pool import run_on_ranks
from tests.learning.toy import write_actor, write_prompts


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> GRPORun:
    root = tmp_path_factory.mktemp("single")
    write_actor(root / "actor")
    write_prompts(root / "prompts.jsonl", count=8)
    return GRPORun(
        actor=Actor(model=str(root / "actor"), optimizer=Optimizer(learning_rate=1e-3), micro_batch_tokens=32),
        reward=Reward(functions=("length",)),
        algorithm=GRPO(kl_coef=0.0),
        rollout=Rollout(batch_size=4, samples_per_prompt=2, max_new_tokens=6),
        data=Data(prompts=str(root / "prompts.jsonl"), max_prompt_tokens=8),
        run=Run(steps=3, sample_texts=0, tensorboard=False),
    )


def train(rank: int, world_size: int, settings: GRPORun) -> None:
    from megarlhf.loop.launch import run_training

    run_training("grpo", settings, rank, world_size)


def run(settings: GRPORun, world_size: int, folder):
    settings = replace(settings, run=replace(settings.run, dir=str(folder)))
    run_on_ranks(world_size, train, settings)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows, load_file(folder / "hf/model.safetensors")


def test_it_trains_as_with_a_pass_of_its_own(settings, tmp_path):
    """The same weights, entropy and gap, on one rank, and on two as pipeline stages."""
    scored = replace(settings, rollout=replace(settings.rollout, max_logp_gap=1.0))
    assert update_says_start(settings) and not update_says_start(scored)
    staged = replace(settings, actor=replace(settings.actor, train=Layout(pp=2)))
    expected, weights = run(scored, 1, tmp_path / "scored")
    for name, chosen, world_size in (("one", settings, 1), ("two", staged, 2)):
        rows, found = run(chosen, world_size, tmp_path / name)
        assert "time/logp_s" in expected[0] and "time/logp_s" not in rows[0]
        for row, other in zip(rows, expected, strict=True):
            assert row["objective/entropy"] == pytest.approx(other["objective/entropy"], rel=1e-4)
            assert row["objective/scores"] == other["objective/scores"], "it sampled something else"
            assert row["rollout/logp_gap_max"] < 1e-4 and row["policy/approxkl_avg"] == 0 and row["val/ratio"] == 1
        differences = [float((weights[key] - found[key]).abs().max()) for key in weights]
        assert max(differences) < 2e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": GRPO(kl_coef=0.0, num_epochs=2)},
        {"algorithm": GRPO(kl_coef=0.0, num_minibatches=2)},
        {"algorithm": GRPO(kl_coef=0.04)},
        {"actor": Actor(dropout=0.1)},
    ],
)
def test_whatever_makes_the_update_say_something_else_keeps_the_pass(settings, changes):
    assert not update_says_start(replace(settings, **changes))


def test_a_profiled_step_leaves_a_trace_and_its_costs_on_every_rank(settings, tmp_path):
    chosen = replace(settings, run=replace(settings.run, steps=2, profile=(2,)))
    rows, _ = run(chosen, 2, tmp_path / "run")
    folder = tmp_path / "run/profile"
    files = {path.name for path in folder.iterdir()}
    endings = ("json", "md", "trace.json.gz")
    assert files == {f"step_2_rank_{rank}.{ending}" for rank in (0, 1) for ending in endings}
    with gzip.open(folder / "step_2_rank_1.trace.json.gz") as stream:
        names = {event.get("name") for event in json.load(stream)["traceEvents"]}
    assert {"megarlhf::forward", "megarlhf::backward", "megarlhf::stage generate", "aten::mm"} <= names
    stages = {row["name"]: row for row in json.loads((folder / "step_2_rank_0.json").read_text())}
    assert list(stages)[0] == "step" and {"generate", "reward", "learn_actor", "reshard"} <= set(stages)
    assert 0 < stages["generate"]["kinds"]["sample"] < stages["generate"]["seconds"]
    assert set(stages["learn_actor"]["kinds"]) == {"forward", "backward", "optimizer", "communicate"}
    assert 0 < stages["learn_actor"]["seconds"] < 1.01 * rows[1]["time/learn_actor_s"]
    for row in stages.values():
        assert 0 <= row["framework_s"] <= row["seconds"]
