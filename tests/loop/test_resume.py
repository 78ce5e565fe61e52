"""A run that is stopped and goes on is the run that was not stopped: bit for bit, and in another layout to rounding."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarlhf.config.algorithms import DPO, GRPO, PPO
from megarlhf.config.corpus import Corpus
from megarlhf.config.layout import Layout
from megarlhf.config.lora import LoRA
from megarlhf.config.precision import FP8
from megarlhf.config.runs import DPORun, GRPORun, RewardModelRun, SFTRun
from megarlhf.config.settings import (
    Actor,
    CorpusRun,
    Critic,
    Data,
    Optimizer,
    PPORun,
    Pretraining,
    Reference,
    Reward,
    RewardTrainee,
    Rollout,
    Run,
    Trainee,
)  # fmt: skip
from megarlhf.errors import Requeue
from megarlhf.weights.boxes import shape_of, slices, whole
from megarlhf.weights.torch_dist import TorchDistFolder
from tests.distributed.pool import run_on_ranks
from tests.learning.toy import (
    ANSWER_TOKENS,
    answer,
    metrics,
    random_prompt,
    train,
    write_actor,
    write_rows,
)
from tests.tiny import write_llama

STEPS = 3
FAST = Optimizer(learning_rate=1e-2, schedule="linear", warmup_updates=2)
NO_TIME = 1e-9
"""Minutes after which every run is late: each launch does one step, saves and stops."""


@pytest.fixture(scope="module")
def toy(single_rank, tmp_path_factory) -> Path:
    root, rng = tmp_path_factory.mktemp("resume"), random.Random(0)
    write_actor(root / "actor")
    write_llama(root / "mixture", family="mixtral", num_hidden_layers=2)
    write_llama(root / "reward", tied=True, num_hidden_layers=2, num_labels=1, seed=3)
    prompts = ("tjqo", "abhp", "zwon", "kwlz", "cjqs", "yrme")  # half of them have no signal
    write_rows(root / "prompts.jsonl", [{"prompt": prompt, "id": number} for number, prompt in enumerate(prompts)])
    write_rows(root / "texts.jsonl", [{"text": random_prompt(rng)} for _ in range(3)])
    answers = [(random_prompt(rng), answer(rng, ANSWER_TOKENS), answer(rng, 0)) for _ in range(5)]
    write_rows(root / "shown.jsonl", [{"prompt": prompt, "response": good} for prompt, good, _ in answers])
    write_rows(root / "pairs.jsonl", [{"prompt": prompt, "chosen": a, "rejected": b} for prompt, a, b in answers])
    return root


def online(toy: Path, folder: Path) -> dict:
    return {
        "actor": Actor(model=str(toy / "actor"), train=Layout(pp=2), optimizer=FAST, average_decay=0.5),
        "rollout": Rollout(batch_size=4, max_new_tokens=6),
        "data": Data(prompts=str(toy / "prompts.jsonl"), max_prompt_tokens=8),
        "run": Run(dir=str(folder), steps=STEPS, checkpoint_every=STEPS, tensorboard=False),
    }


def ppo(toy: Path, folder: Path) -> PPORun:
    """Everything that a PPO run can remember."""
    return PPORun(
        critic=Critic(train=Layout(tp=2, sp=True), optimizer=FAST),
        reward=Reward(model=str(toy / "reward"), functions=("tests.loop.plugin:capitals",)),
        algorithm=PPO(
            num_epochs=2, kl_controller="adaptive", kl_target=0.5, kl_horizon=20, normalise_scores="standardise"
        ),
        pretraining=Pretraining(path=str(toy / "texts.jsonl"), coef=0.5, batch_size=2, max_tokens=16),
        **online(toy, folder),
    )


def grpo(toy: Path, folder: Path) -> GRPORun:
    """Prompts without signal are replaced, and the reference follows: the data position is no function of the step."""
    rollout = Rollout(batch_size=2, samples_per_prompt=4, max_new_tokens=6, extra_rounds=2)
    return GRPORun(
        reward=Reward(functions=("tests.loop.plugin:capitals_after_a_to_m",)),
        reference=Reference(follow_rate=0.5),
        algorithm=GRPO(kl_coef=0.05),
        **online(toy, folder) | {"rollout": rollout},
    )


def experts(toy: Path, folder: Path) -> GRPORun:
    """Each rank holds half of the experts, of the weights, the optimizer and both averages."""
    run = grpo(toy, folder)
    return replace(
        run,
        actor=Actor(model=str(toy / "mixture"), train=Layout(ep=2), optimizer=FAST, average_decay=0.5),
        rollout=replace(run.rollout, extra_rounds=0),
        run=replace(run.run, steps=2, checkpoint_every=2),
    )


def offline(toy: Path, folder: Path, file: str) -> dict:
    return {
        "data": Corpus(path=str(toy / file), batch_size=2, max_tokens=16, epochs=1),
        "run": CorpusRun(dir=str(folder), checkpoint_every=2, tensorboard=False),
    }


def sft(toy: Path, folder: Path, layout: Layout | None = None) -> SFTRun:
    actor = Trainee(model=str(toy / "actor"), train=layout or Layout(), optimizer=FAST)
    return SFTRun(actor=actor, **offline(toy, folder, "shown.jsonl"))


def dpo(toy: Path, folder: Path) -> DPORun:
    actor = Trainee(model=str(toy / "actor"), optimizer=FAST, lora=LoRA(rank=2))
    return DPORun(actor=actor, algorithm=DPO(), **offline(toy, folder, "pairs.jsonl"))


def rm(toy: Path, folder: Path) -> RewardModelRun:
    reward = RewardTrainee(
        model=str(toy / "actor"),
        train=Layout(tp=2),
        optimizer=FAST,
        dtype="bfloat16",
        layers="emulated_fp8",
        fp8=FP8(recipe="delayed", force_delayed=True),
    )
    return RewardModelRun(reward=reward, **offline(toy, folder, "pairs.jsonl"))


def launches(rank: int, world_size: int, command: str, settings) -> int:
    """Starts the command again until it ends; returns how often that was."""
    for launch in range(1, 10):
        try:
            train(rank, world_size, command, settings)
            return launch
        except Requeue:
            continue
    raise AssertionError("the run makes no progress")


def first_launch(rank: int, world_size: int, command: str, settings) -> None:
    """Starts the command once; it is stopped."""
    with pytest.raises(Requeue, match="stopped by run.save_before_minutes 1e-09 after saving step 1;"):
        train(rank, world_size, command, settings)


def stopped_often(settings, folder: Path):
    return replace(settings, run=replace(settings.run, dir=str(folder), save_before_minutes=NO_TIME))


def tensors(run_folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds, by name."""
    folder, found = TorchDistFolder(run_folder / f"checkpoints/step_{step}"), {}
    for name in folder.names:
        found[name] = torch.empty(shape_of(whole(folder.shape(name))))
        for box, values in folder.parts(name, whole(folder.shape(name))):
            found[name][slices(box)] = values
    return found


def numbers(folder: Path) -> list[dict]:
    """metrics.jsonl without times and memory, which a new process has its own of."""
    return [
        {name: value for name, value in row.items() if not name.startswith(("time/", "memory/"))}
        for row in metrics(folder)
    ]


@pytest.mark.parametrize(
    ("command", "settings", "num_ranks", "steps"),
    [
        ("ppo", ppo, 2, 3),
        ("grpo", grpo, 2, 3),
        ("grpo", experts, 2, 2),
        ("sft", sft, 2, 2),
        ("rm", rm, 2, 2),
        ("dpo", dpo, 1, 2),
    ],
    ids=["ppo", "grpo", "experts", "sft", "rm", "dpo"],
)
def test_a_run_stopped_after_every_step_ends_with_the_same_bits(toy, tmp_path, command, settings, num_ranks, steps):
    whole_run, parts = settings(toy, tmp_path / "whole"), stopped_often(settings(toy, tmp_path), tmp_path / "parts")
    if command == "sft":
        whole_run, parts = (replace(run, actor=replace(run.actor, dropout=0.2)) for run in (whole_run, parts))
    if num_ranks == 1:
        train(0, 1, command, whole_run)
        assert launches(0, 1, command, parts) == steps
    else:
        run_on_ranks(num_ranks, train, command, whole_run)
        assert run_on_ranks(num_ranks, launches, command, parts) == [steps] * num_ranks
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole") and len(numbers(tmp_path / "whole")) == steps
    samples = [(tmp_path / name / "samples.jsonl").read_text() for name in ("whole", "parts")]
    assert samples[0] == samples[1]
    expected, found = tensors(tmp_path / "whole", steps), tensors(tmp_path / "parts", steps)
    assert expected.keys() == found.keys() and any("exp_avg_sq" in name for name in found)
    different = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert not different
    learner = "reward" if command == "rm" else "actor"
    assert all(row[f"gradient_norm/{learner}"] > 0 for row in numbers(tmp_path / "whole"))
    names = {"hf", "hf_average"} if command in ("ppo", "grpo") else {"hf"}
    for name in names | ({"hf_lora"} if command == "dpo" else set()):
        file = "adapter_model.safetensors" if name == "hf_lora" else "model.safetensors"
        assert (tmp_path / "whole" / name / file).read_bytes() == (tmp_path / "parts" / name / file).read_bytes()
    assert json.loads((tmp_path / "parts/status.json").read_text())["code"] == 0


@pytest.mark.parametrize(
    ("before", "after", "model"),
    [
        (Layout(tp=2), Layout(pp=2), "actor"),
        (Layout(), Layout(tp=2, sp=True), "actor"),
        (Layout(pp=2), Layout(), "actor"),
        (Layout(cp=2), Layout(), "actor"),
        (Layout(ep=2), Layout(pp=2), "mixture"),
    ],
    ids=["tp2-pp2", "dp2-tp2", "pp2-dp2", "cp2-dp2", "ep2-pp2"],
)
def test_another_layout_goes_on_with_the_same_losses(toy, tmp_path, before, after, model):
    whole_run = sft(toy, tmp_path / "whole", before)
    actor = replace(whole_run.actor, model=str(toy / model))
    whole_run = replace(whole_run, actor=actor, data=replace(whole_run.data, epochs=2))
    run_on_ranks(2, train, "sft", whole_run)
    first = stopped_often(whole_run, tmp_path / "moved")
    run_on_ranks(2, first_launch, "sft", first)
    assert json.loads((tmp_path / "moved/status.json").read_text())["code"] == 75
    moved = replace(first, actor=replace(first.actor, train=after), run=replace(first.run, save_before_minutes=0.0))
    run_on_ranks(2, train, "sft", moved)
    losses = [[row["loss/sft_avg"] for row in metrics(tmp_path / name)] for name in ("whole", "moved")]
    assert len(losses[0]) > 2 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    norms = [[row["gradient_norm/actor"] for row in metrics(tmp_path / name)] for name in ("whole", "moved")]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def short_ppo(toy: Path, folder: Path, before: bool) -> PPORun:
    """Actor and critic change places: tensor ranks become pipeline stages, and the other way round."""
    layouts = (Layout(tp=2), Layout(pp=2))
    actor, critic = layouts if before else layouts[::-1]
    run = ppo(toy, folder)
    return replace(
        run,
        actor=replace(run.actor, train=actor),
        critic=replace(run.critic, train=critic),
        run=replace(run.run, steps=2),
    )


def short_grpo(toy: Path, folder: Path, before: bool) -> GRPORun:
    run = grpo(toy, folder)
    layout = Layout() if before else Layout(tp=2, sp=True)
    return replace(
        run,
        actor=replace(run.actor, train=layout),
        algorithm=replace(run.algorithm, num_epochs=2),
        run=replace(run.run, steps=2),
    )


@pytest.mark.parametrize(("command", "settings"), [("ppo", short_ppo), ("grpo", short_grpo)], ids=["ppo", "grpo"])
def test_policies_go_on_in_another_layout_with_the_same_losses(toy, tmp_path, command, settings):
    run_on_ranks(2, train, command, settings(toy, tmp_path / "whole", True))
    run_on_ranks(2, first_launch, command, stopped_often(settings(toy, tmp_path, True), tmp_path / "moved"))
    run_on_ranks(2, train, command, settings(toy, tmp_path / "moved", False))
    expected, found = numbers(tmp_path / "whole")[1], numbers(tmp_path / "moved")[1]
    losses = [name for name in expected if name.startswith("loss/") or name.startswith("gradient_norm/")]
    assert "gradient_norm/actor" in losses and any(abs(expected[name]) > 1e-3 for name in losses)
    for name in losses:
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
    samples = [(tmp_path / name / "samples.jsonl").read_text().splitlines() for name in ("whole", "moved")]
    texts = [[json.loads(line)["response"] for line in lines] for lines in samples]
    assert texts[0] == texts[1]


def test_checkpoints_written_in_the_background_are_the_same(toy, tmp_path):
    """The weights that training goes on changing are not the ones that are being written."""
    plain = sft(toy, tmp_path / "plain")
    plain = replace(plain, run=replace(plain.run, checkpoint_every=1, keep_checkpoints=0))
    behind = replace(plain, run=replace(plain.run, dir=str(tmp_path / "behind"), checkpoint_in_background=True))
    run_on_ranks(2, train, "sft", plain)
    run_on_ranks(2, train, "sft", behind)
    for step in (1, 2):
        expected, found = tensors(tmp_path / "plain", step), tensors(tmp_path / "behind", step)
        assert expected.keys() == found.keys()
        assert not [name for name in expected if not torch.equal(expected[name], found[name])]
