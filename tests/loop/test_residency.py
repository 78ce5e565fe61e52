"""Where models wait changes no bit of what is trained, and what a run writes down is what it did."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarlhf.config.algorithms import GRPO, PPO
from megarlhf.config.layout import Layout
from megarlhf.config.lora import LoRA
from megarlhf.config.residency import CriticResidency, Residency, TrainedResidency
from megarlhf.config.runs import GRPORun
from megarlhf.config.settings import Actor, Critic, Data, Optimizer, PPORun, Reference, Reward, Rollout, Run
from megarlhf.residency.schedule import Sharing, homes, stages
from megarlhf.residency.stages import timeline
from tests.distributed.pool import run_on_ranks
from tests.learning.toy import train, write_actor, write_prompts
from tests.tiny import write_llama

ON_DISK = CriticResidency(idle="disk", check_transfers=True)
SETTINGS = {
    "host": CriticResidency(idle="host"),
    "disk": ON_DISK,
    "disk, sampling from the training weights": replace(ON_DISK, generator="view"),
    "some of it": CriticResidency(
        actor=TrainedResidency(optimizer="disk", gradients="freed"),
        critic=TrainedResidency(weights="host", optimizer="host"),
        reference="device",
        reward="device",
        generator="freed",
    ),
}
LAYOUTS = {
    "1": (1, Layout(), Layout()),
    "2, resharded": (2, Layout(pp=2), Layout()),
    "2": (2, Layout(tp=2), Layout(tp=2)),
}
"""(ranks, training layout, generation layout)."""


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """An actor, another one as its reference, and a reward model that the critic starts from."""
    root = tmp_path_factory.mktemp("residency")
    write_actor(root / "actor")
    write_llama(root / "reference", tied=True, num_hidden_layers=3, seed=5)
    write_llama(root / "reward", num_labels=1, seed=6)
    write_llama(root / "critic", num_labels=1, seed=7)
    write_prompts(root / "prompts.jsonl", count=8)
    return root


def settings(toy: Path, folder: Path, layout: str, residency: CriticResidency) -> PPORun:
    """Two steps of PPO with all four models."""
    optimizer, (_, train, generate) = Optimizer(learning_rate=1e-2), LAYOUTS[layout]
    return PPORun(
        actor=Actor(model=str(toy / "actor"), train=train, generate=generate, optimizer=optimizer),
        critic=Critic(model=str(toy / "critic"), optimizer=optimizer),
        reference=Reference(model=str(toy / "reference")),
        reward=Reward(model=str(toy / "reward"), functions=("length",)),
        algorithm=PPO(num_epochs=2, num_minibatches=2),
        rollout=Rollout(batch_size=4, max_new_tokens=10),
        data=Data(prompts=str(toy / "prompts.jsonl"), max_prompt_tokens=8),
        residency=residency,
        run=Run(dir=str(folder), steps=2, save_every=1, sample_texts=1, tensorboard=False),
    )


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(folder: Path) -> list[dict]:
    """Metrics by step, without those of time and memory."""
    return [
        {name: value for name, value in row.items() if not name.startswith(("time/", "memory/", "bytes/"))}
        for row in rows(folder / "metrics.jsonl")
    ]


def trained(folder: Path) -> dict:
    """Everything that two runs have to agree on to the bit."""
    last = folder / "exports/step_2"
    weights = {model: load_file(last / model / "model.safetensors") for model in ("actor", "critic")}
    return {"weights": weights, "numbers": numbers(folder), "samples": rows(folder / "samples.jsonl")}


@pytest.fixture(scope="module")
def resident(toy, tmp_path_factory):
    """What a run with everything on the device trains, by layout."""

    @cache
    def run(layout: str) -> dict:
        folder = tmp_path_factory.mktemp("resident")
        run_on_ranks(LAYOUTS[layout][0], train, "ppo", settings(toy, folder, layout, CriticResidency()))
        return trained(folder)

    return run


CASES = [(layout, name) for layout in ("1", "2, resharded") for name in SETTINGS if SETTINGS[name].generator != "view"]
CASES += [(layout, "disk, sampling from the training weights") for layout in ("1", "2")]


def test_what_is_written_down_is_what_the_tables_say(toy, tmp_path):
    """Stages, places and moves of a step are those of the pure tables, which a planner reads."""
    wanted = settings(toy, tmp_path, "1", ON_DISK)
    run_on_ranks(1, train, "ppo", wanted)
    found = [row for row in rows(tmp_path / "memory.jsonl") if row["step"] == 2 and not row["stage"].startswith("save")]
    planned = timeline(stages(homes(wanted), Sharing(reward_in_critic=True)), homes(wanted))
    assert [row["stage"] for row in found] == [one.stage.name for one in planned]
    sizes: dict[str, int] = {}
    for row in found:
        sizes |= {name: max(sizes.get(name, 0), *places.values()) for name, places in row["tenants"].items()}
    for row, one in zip(found, planned, strict=True):
        places = {str(tenant): place for tenant, place in one.places.items() if place != "gone"}
        held = {name: place for name, where in row["tenants"].items() for place, size in where.items() if size}
        assert held == places
        for place in ("device", "host", "disk"):
            assert row[f"{place}_bytes"] == sum(sizes[name] for name, where in places.items() if where == place)
    weights = sum(tensor.nbytes for tensor in load_file(toy / "actor/model.safetensors").values())
    assert sizes["reference.weights"] == sizes["generator.weights"] == sizes["actor.optimizer"] // 2 == weights
    padding = sizes["actor.weights"] - weights
    assert 0 <= padding < 2048 and sizes["actor.gradients"] == sizes["actor.weights"], "buffers are padded alike"
    step = rows(tmp_path / "metrics.jsonl")[1]
    assert step["memory/peak_gib"] * 2**30 == max(
        row["peak_bytes"] for row in rows(tmp_path / "memory.jsonl") if row["step"] == 2
    )


@pytest.mark.parametrize("layout, name", CASES)
def test_any_residency_trains_the_same_bits(toy, tmp_path, resident, layout, name):
    run_on_ranks(LAYOUTS[layout][0], train, "ppo", settings(toy, tmp_path, layout, SETTINGS[name]))
    ours, theirs = trained(tmp_path), resident(layout)
    assert ours["samples"] == theirs["samples"]
    assert ours["numbers"] == theirs["numbers"]
    for model in ("actor", "critic"):
        assert ours["weights"][model].keys() == theirs["weights"][model].keys()
        assert all(torch.equal(ours["weights"][model][key], value) for key, value in theirs["weights"][model].items())
    assert not list((tmp_path / "residency").rglob("*.bin")), "files are left behind"


@pytest.mark.parametrize("name", ["averages and dynamic sampling", "adapters"])
def test_what_else_a_run_can_have_waits_on_disk_too(toy, tmp_path, name):
    """Without a critic: averages that follow the actor and groups that are drawn until they differ; or adapters."""
    base = settings(toy, tmp_path, "1", CriticResidency())
    actor, reference, rollout = base.actor, Reference(), replace(base.rollout, samples_per_prompt=4)
    if name == "adapters":
        actor = replace(actor, lora=LoRA(rank=4))
    else:
        actor, reference = replace(actor, average_decay=0.5), Reference(follow_rate=0.5)
        rollout = replace(rollout, extra_rounds=1)
    found = []
    for residency in (Residency(), Residency(idle="disk", check_transfers=True)):
        folder = tmp_path / residency.idle
        run = replace(base.run, dir=str(folder), save_every=0)
        wanted = GRPORun(
            actor=actor,
            reference=reference,
            reward=Reward(model=str(toy / "reward")),
            algorithm=GRPO(kl_coef=0.01),
            rollout=rollout,
            data=base.data,
            residency=residency,
            run=run,
        )
        run_on_ranks(1, train, "grpo", wanted)
        exported = {path.parent.name: load_file(path) for path in sorted(folder.glob("hf*/*.safetensors"))}
        found.append((exported, numbers(folder), rows(folder / "samples.jsonl")))
    (ours, *rest), (theirs, *others) = found
    assert len(ours) == 2 and ours.keys() == theirs.keys() and rest == others
    assert all(torch.equal(ours[model][key], value) for model in ours for key, value in theirs[model].items())


def test_a_run_is_resumed_from_what_waited_on_disk(toy, tmp_path):
    """Two steps under one residency, the third under another: the same as three in one go."""
    straight, halves = tmp_path / "straight", tmp_path / "halves"
    wanted = settings(toy, straight, "1", CriticResidency())
    run = replace(wanted.run, steps=3, save_every=0)
    run_on_ranks(1, train, "ppo", replace(wanted, run=run))
    halved = replace(wanted, residency=ON_DISK, run=replace(run, dir=str(halves), steps=2, checkpoint_every=2))
    run_on_ranks(1, train, "ppo", halved)
    resumed = replace(run, dir=str(tmp_path / "resumed"), resume=str(halves))
    run_on_ranks(1, train, "ppo", replace(wanted, run=resumed))
    ours, theirs = (load_file(folder / "hf/model.safetensors") for folder in (tmp_path / "resumed", straight))
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())


def test_what_cannot_be_is_told_before_anything_is_loaded(toy, tmp_path):
    from megarlhf.loop.preflight import preflight

    (tmp_path / "file").write_text("")
    residency = replace(ON_DISK, generator="view", folder=str(tmp_path / "file/inside"), device_gib=-1.0)
    wanted = settings(toy, tmp_path / "run", "2, resharded", residency)
    found = preflight(replace(wanted, reference=Reference(follow_rate=0.5)), 2)
    assert [line.partition(":")[0] for line in found] == ["residency.device_gib", "residency.folder"]
    residency = replace(residency, device_gib=0.0, folder="", reference="disk")
    found = preflight(replace(wanted, residency=residency, reference=Reference(follow_rate=0.5)), 2)
    assert [line.partition(":")[0] for line in found] == ["residency.reference", "residency.generator"]
