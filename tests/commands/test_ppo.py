"""The command as a user types it: torchrun with two ranks, bare, and wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.learning.toy import write_actor, write_prompts

PINNED = """step episode objective/kl objective/scores objective/rlhf_reward objective/non_score_reward
objective/entropy
policy/approxkl_avg policy/clipfrac_avg val/clipfrac_avg loss/policy_avg loss/value_avg val/ratio val/num_eos_tokens
lr/actor lr/critic rollout/logp_gap_max bytes/resharded time/generate_s time/reshard_s time/reference_s time/reward_s
time/value_s time/learn_critic_s time/learn_actor_s time/save_s time/total_s""".split()


def launch(*words: str, ranks: int = 0) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, "-m", "megarlhf", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=170)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("command")
    write_actor(root / "actor")
    write_prompts(root / "prompts.jsonl", count=8)
    settings = {
        "actor": {"model": str(root / "actor"), "train": {"pp": 2}},
        "critic": {"train": {"tp": 2}},
        "reward": {"functions": ["length"]},
        "rollout": {"batch_size": 4, "max_new_tokens": 6},
        "algorithm": {"num_epochs": 2},
        "data": {"prompts": str(root / "prompts.jsonl"), "max_prompt_tokens": 8},
        "run": {"dir": str(root / "run"), "steps": 2, "save_every": 2},
    }
    (root / "toy.yaml").write_text(yaml.safe_dump(settings))
    return root / "toy.yaml"


def test_two_ranks_train_and_leave_a_whole_run_folder(recipe):
    done = launch("ppo", str(recipe), ranks=2)
    assert done.returncode == 0, done.stderr
    run = recipe.parent / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and [row["episode"] for row in rows] == [4, 8]
    assert set(PINNED) <= rows[1].keys(), set(PINNED) - rows[1].keys()
    assert set(PINNED) - rows[0].keys() == {"time/save_s"}, "what does not apply is absent, and nothing else"
    assert rows[1]["objective/kl"] != 0 and rows[0]["bytes/resharded"] > 0
    assert json.loads((run / "status.json").read_text()) == {"code": 0, "reason": "done"}
    assert (run / "samples.jsonl").read_text().count("\n") == 8
    assert {"actor", "critic"} == {folder.name for folder in (run / "exports/step_2").iterdir()}
    assert (run / "hf/model.safetensors").exists() and (run / "config.yaml").exists()
    assert "before" in done.stdout and f"megarlhf chat {run / 'hf'}" in done.stdout
    again = launch("ppo", str(run / "config.yaml"), ranks=2)
    assert "already holds a run" in again.stderr
    assert json.loads((run / "status.json").read_text())["code"] == 0, "the status of the finished run was lost"
    shown = launch("show", "ppo", str(run / "config.yaml"))
    assert yaml.safe_load(shown.stdout) == yaml.safe_load((run / "config.yaml").read_text())


def test_bare_with_a_layout_of_two_ranks_exits_2_with_the_launch_command(recipe):
    wrong = ["--run.dir", str(recipe.parent / "bare"), "--data.prompts", "nowhere.jsonl"]
    done = launch("ppo", str(recipe), *wrong)
    assert done.returncode == 2
    assert f"torchrun --nproc-per-node 2 -m megarlhf ppo {recipe}" in done.stderr
    assert "data.prompts" in done.stderr and "Traceback" not in done.stderr
    assert json.loads((recipe.parent / "bare/status.json").read_text())["code"] == 2


def test_a_wrong_key_leaves_its_reason_in_the_run_folder(recipe):
    folder = recipe.parent / "mistyped"
    done = launch("ppo", str(recipe), "--run.dir", str(folder), "--run.stepz", "3", ranks=2)
    assert done.returncode == 1, "torchrun's code for every failure"
    status = json.loads((folder / "status.json").read_text())
    assert status["code"] == 2 and "did you mean run.steps?" in status["reason"]
