"""A kept step, done again: the same to the bit in its own layout, to rounding in another, and what differs is named."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megarlhf.checkpoints.capsule import Capsule
from megarlhf.commands.replay import main
from megarlhf.config.algorithms import PPO
from megarlhf.config.layout import Layout
from megarlhf.config.precision import FP8
from megarlhf.config.replay import Replay, in_layout, tolerances
from megarlhf.config.settings import Actor, Data, PPORun, Reward, Rollout, Run
from megarlhf.device.transformer_engine import Machine
from megarlhf.errors import CheckpointError, ConfigError
from megarlhf.loop.replay import Compared, replay_plan, require_whole
from megarlhf.records.experience import Experience
from tests.distributed.pool import run_on_ranks
from tests.learning.toy import train
from tests.loop.test_resume import FAST, dpo, grpo, rm, sft, toy
from tests.tiny import write_llama

__all__ = ["toy"]  # the fixture
TP2 = Layout(tp=2, sp=True)


def test_a_folder_that_is_not_there_is_told_as_such(tmp_path):
    with pytest.raises(ConfigError, match=r"RUN_DIR: \S+/none: no such folder"):
        main([str(tmp_path / "none"), "--step", "1"])


def kept(settings, **changes):
    return replace(
        settings, run=replace(settings.run, checkpoint_every=1, keep_checkpoints=0, keep_capsules=9, **changes)
    )


@pytest.fixture(scope="module")
def run_folder(toy, tmp_path_factory) -> Path:
    """Three steps of PPO with a reward model, on two tensor ranks."""
    folder = tmp_path_factory.mktemp("replay") / "run"
    settings = PPORun(
        actor=Actor(model=str(toy / "actor"), train=TP2, generate=Layout(tp=2), optimizer=FAST),
        reward=Reward(model=str(toy / "reward"), functions=("tests.loop.plugin:capitals",)),
        algorithm=PPO(num_epochs=1, num_minibatches=2, kl_controller="adaptive", kl_target=0.5),
        rollout=Rollout(batch_size=4, max_new_tokens=6),
        data=Data(prompts=str(toy / "prompts.jsonl"), max_prompt_tokens=8),
        run=Run(dir=str(folder), steps=3, tensorboard=False),
    )
    run_on_ranks(2, train, "ppo", kept(settings))
    return folder


def again(rank: int, world_size: int, folder: Path, step: int, layout: Layout | None, scratch: Path) -> dict:
    """By name what a rank finds when the step is done again."""
    from megarlhf.checkpoints.capsule import CONFIG, capsule_folder, read_capsule
    from megarlhf.config.load import load
    from megarlhf.config.runs import COMMANDS
    from megarlhf.loop.replay import replay, start_folder
    from megarlhf.loop.roles import roles

    capsule = read_capsule(folder, step)
    settings = load(COMMANDS[capsule.about["command"]], capsule_folder(folder, step) / CONFIG, [])
    settings = in_layout(settings, layout, str(scratch))
    allowed = tolerances(Replay(), {role.dtype for role in roles(settings).values()})
    found = replay(capsule, settings, start_folder(capsule, folder), world_size, (), allowed)
    return {one.name: one for one in found}


def test_a_step_of_two_tensor_ranks_is_the_same_on_one(run_folder, tmp_path, single_rank):
    found = again(0, 1, run_folder, 2, Layout(), tmp_path)
    assert list(found) == [
        *("critic weights before", "actor weights before", "logp_start", "entropy", "logp_reference", "score", "value"),
        *("reward", "token_reward", "advantage", "target", "critic loss", "critic gradient norm"),
        *("actor loss", "actor gradient norm", "critic weights after", "actor weights after"),
    ]
    assert [one.name for one in found.values() if not one.passed] == []
    assert found["actor weights before"].gap == 0 < found["logp_start"].gap  # another layout really computed it


def test_two_pipeline_stages_agree_from_the_first_step_on(run_folder, tmp_path):
    for found in run_on_ranks(2, again, run_folder, 1, Layout(pp=2), tmp_path):
        assert [one.name for one in found.values() if not one.passed] == []


def test_a_tampered_log_prob_is_named(run_folder, tmp_path, single_rank):
    copy = copied(run_folder, tmp_path, step=3)
    file = copy / "capsules/step_3/batch.safetensors"
    batch = load_file(file)
    row, token = batch["scored.mask"].nonzero()[-1].tolist()
    batch["scored.logp_start"][row, token] += 0.01
    save_file(batch, file)
    found = again(0, 1, copy, 3, Layout(), tmp_path)
    first = next(one for one in found.values() if not one.passed)
    assert first.name == "logp_start" and first.gap == pytest.approx(0.01, rel=1e-2)
    assert first.where.startswith(f"row {row} (of the data {int(batch['scored.row_id'][row])}), token {token + 1}: ")
    assert found["logp_reference"].passed and found["value"].passed


def test_another_gradient_and_other_weights_are_named(run_folder, tmp_path, single_rank):
    copy = copied(run_folder, tmp_path, step=3)
    file = copy / "capsules/step_3/capsule.json"
    about = json.loads(file.read_text())
    about["updates"][-1]["gradient_norm"] *= 1.01
    tensor = "model.layers.1.mlp.up_proj.weight"
    about["weights_after"]["critic"][tensor] = [value + 1 for value in about["weights_after"]["critic"][tensor]]
    file.write_text(json.dumps(about))
    found = again(0, 1, copy, 3, Layout(), tmp_path)
    failed = [one for one in found.values() if not one.passed]
    assert [one.name for one in failed] == ["actor gradient norm", "critic weights after"]
    assert failed[0].where.startswith("update 2 of 2: ") and failed[1].where == tensor


def copied(run_folder: Path, tmp_path: Path, step: int) -> Path:
    """A run folder with one capsule of its own and the run's checkpoints."""
    copy = tmp_path / "copy"
    (copy / f"capsules/step_{step}").mkdir(parents=True)
    for file in (run_folder / f"capsules/step_{step}").iterdir():
        (copy / f"capsules/step_{step}" / file.name).write_bytes(file.read_bytes())
    (copy / "checkpoints").symlink_to(run_folder / "checkpoints")
    return copy


@pytest.mark.parametrize(
    ("command", "settings"), [("grpo", grpo), ("dpo", dpo), ("sft", sft), ("rm", rm)], ids=["grpo", "dpo", "sft", "rm"]
)
def test_in_its_own_layout_a_step_is_the_same_to_the_bit(toy, tmp_path, command, settings, single_rank):
    run = kept(settings(toy, tmp_path / "run"))
    if command == "rm":  # on one rank
        run = replace(run, reward=replace(run.reward, train=Layout()))
    if command == "grpo":  # dynamic sampling, and a reference that follows
        run = replace(run, actor=replace(run.actor, train=Layout()))
    train(0, 1, command, run)
    found = again(0, 1, tmp_path / "run", 2, None, tmp_path / "scratch")
    assert len(found) >= 4 and {name: one.gap for name, one in found.items() if one.gap} == {}


def test_a_step_without_a_capsule_is_told_with_those_that_there_are(run_folder, tmp_path):
    with pytest.raises(CheckpointError, match="no capsule of step 7; there are capsules of steps 1, 2, 3"):
        main([str(run_folder), "--step", "7"])
    with pytest.raises(ConfigError, match="--step: not given; there are capsules of steps 1, 2, 3"):
        main([str(run_folder)])
    with pytest.raises(CheckpointError, match="has none: a run keeps them with run.keep_capsules"):
        main([str(tmp_path), "--step", "1"])
    (copied(run_folder, tmp_path, step=3) / "checkpoints").unlink()
    with pytest.raises(CheckpointError, match="step 3 begins at a checkpoint that is not there any more"):
        main([str(tmp_path / "copy"), "--step", "3"])


def test_what_is_wrong_with_the_flags_is_told_at_once(run_folder):
    with pytest.raises(ConfigError) as error:
        main([str(run_folder), "--step", "2", "--layout", "tp3", "--skip", "critic", "--actor.dropout", "x"])
    told = "\n".join(error.value.violations)
    for words in (
        "--skip: 'critic' is no stage",
        "tp 3 does not divide 4 attention heads",
        "--actor.dropout: expected",
    ):
        assert words in told, told
    with pytest.raises(ConfigError, match="--layout: 'tq2' is no layout"):
        main([str(run_folder), "--step", "2", "--layout", "tq2"])


def test_ranks_sizes_and_machines_that_do_not_fit_are_told(tmp_path, monkeypatch):
    write_llama(tmp_path / "actor")
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: cls(None, None)))
    actor = Actor(model=str(tmp_path / "actor"), train=Layout(tp=4), layers="te", fp8=FP8("blockwise"))
    told = "\n".join(replay_plan(PPORun(actor=actor), 2, "replay"))
    assert "actor.train: tp 4 * pp 1 * cp 1 = 4 ranks hold one copy of the model, which does not divide the 2" in told
    assert "actor.layers: te needs Transformer Engine, which is not installed" in told
    assert "actor.train: tp 4 leaves a rank " in told and "need a multiple of 16; choose another tp" in told
    assert "actor.generate" not in told  # nothing is sampled


def test_a_capsule_that_lacks_something_is_damaged():
    nothing = Experience.from_completions(
        [[5]], [[8]], [[-0.5]], row_id=[3], group=[0], finished=[True], prompts=["a"], responses=["b"], metadata=[{}]
    )
    about = dict.fromkeys(
        ("start", "num_rows", "num_ranks", "state", "learning_rates", "updates", "weights_before", "weights_after")
    )
    require_whole(Capsule(2, nothing, nothing, about | {"command": "reinforce++"}, ""))
    with pytest.raises(CheckpointError, match="step 2 is damaged: 'sing' is no training command"):
        require_whole(Capsule(2, nothing, nothing, about | {"command": "sing"}, ""))
    del about["start"]
    with pytest.raises(CheckpointError, match="step 2 is damaged: it lacks start"):
        require_whole(Capsule(2, nothing, nothing, about | {"command": "ppo"}, ""))


def test_a_gap_that_is_no_number_is_null_in_json():
    for gap in (float("nan"), float("inf")):
        numbers = Compared("value", gap, 1e-4, "", "the run had none").numbers
        assert (numbers["gap"], numbers["passed"]) == (None, False)
    assert Compared("value", 0.5, 1.0, "", "row 1").numbers["gap"] == 0.5


@pytest.mark.slow
def test_the_command_starts_its_own_ranks_and_fails_when_a_difference_is_too_large(run_folder):
    command = [sys.executable, "-m", "megarlhf", "replay", str(run_folder), "--step", "2", "--layout", "pp2"]
    done = subprocess.run([*command, "--score_tolerance", "0"], capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    assert done.returncode == 1, done.stderr
    assert lines[0].startswith("computed again") and lines[-1].startswith("17 compared, ")
    assert "differ; the first is logp_start, row " in lines[-1]
