"""Ranks that are killed, frozen or raise at random moments: nobody hangs, no checkpoint is lost, the end is the same.

`make test-kill` runs 30 trials; KILL_TRIALS and KILL_SEED choose others. What is killed are whole processes that run
the command as a launcher would start them.
"""

import json
import os
import random
import re
import time
from pathlib import Path

import pytest
import torch
import yaml

from megarlhf.checkpoints.discovery import whole_checkpoints
from megarlhf.checkpoints.manifest import require_intact
from megarlhf.telemetry.status import read_status
from tests.distributed.pool import free_port
from tests.learning.toy import metrics, write_actor, write_prompts
from tests.loop.kill_ranks import Fault, rank_process
from tests.loop.test_resume import tensors

pytestmark = pytest.mark.slow
TRIALS, SEED = int(os.environ.get("KILL_TRIALS", "3")), int(os.environ.get("KILL_SEED", "0"))
STEPS, RANKS = 3, 2
STAGES = ("checkpoint", "generate", "reward", "learn_actor", "reshard", "value", "learn_critic")
HANG_S = 30
"""A trial's ranks are all gone so many seconds after the first of them."""
PATIENCE_S = 150


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("kill")
    write_actor(root / "actor")
    write_prompts(root / "prompts.jsonl", count=6)
    settings = {
        "actor": {"model": str(root / "actor"), "train": {"pp": 2}, "optimizer": {"learning_rate": 0.01}},
        "critic": {"train": {"tp": 2}, "optimizer": {"learning_rate": 0.01}},
        "reward": {"functions": ["tests.loop.plugin:capitals"]},
        "rollout": {"batch_size": 4, "max_new_tokens": 6},
        "algorithm": {"num_epochs": 2},
        "data": {"prompts": str(root / "prompts.jsonl"), "max_prompt_tokens": 8},
        "run": {"dir": str(root / "whole"), "steps": STEPS, "checkpoint_every": 1, "tensorboard": False},
    }
    (root / "toy.yaml").write_text(yaml.safe_dump(settings))
    return root / "toy.yaml"


@pytest.fixture(scope="module")
def expected(processes, recipe) -> dict[str, torch.Tensor]:
    """The last checkpoint of a run that nothing happened to."""
    codes, log = launched(processes, recipe, recipe.parent / "whole", None)
    assert codes == [0, 0], log
    return tensors(recipe.parent / "whole", STEPS)


def launched(processes, recipe: Path, folder: Path, fault: Fault | None) -> tuple[list[int], str]:
    """Exit codes of both ranks and what they printed; all end within HANG_S of the first one that is struck."""
    log = folder.with_name(f"{folder.name}.{time.time_ns()}.log")
    words, port = ["ppo", str(recipe), "--run.dir", str(folder)], free_port()
    ranks = [
        processes.Process(target=rank_process, args=(rank, RANKS, port, words, str(log), fault))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    struck, deadline = Path(f"{log}.struck"), time.time() + PATIENCE_S
    while any(process.is_alive() for process in awaited(ranks, fault)):
        if struck.exists() and struck.read_text():
            deadline = min(deadline, float(struck.read_text()) + HANG_S)
        if time.time() > deadline:
            break
        time.sleep(0.05)
    hung = [rank for rank, process in enumerate(ranks) if process in awaited(ranks, fault) and process.is_alive()]
    for process in ranks:
        process.kill()
        process.join()
    assert not hung, f"ranks {hung} were still there:\n{log.read_text()}"
    return [process.exitcode for process in ranks], log.read_text()


def awaited(ranks: list, fault: Fault | None) -> list:
    """A frozen process ends only when it is killed."""
    frozen = fault.ranks if fault is not None and fault.kind == "stop" else ()
    return [process for rank, process in enumerate(ranks) if rank not in frozen]


def random_fault(trial: int) -> Fault:
    rng = random.Random(f"{SEED} {trial}")
    ranks = rng.choice([(0,), (1,), (0, 1)])
    return Fault(STAGES[trial % len(STAGES)], rng.randint(1, 2), ranks, rng.choice([0.0, rng.uniform(0, 0.05)]))


@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_killed_run_goes_on_and_ends_with_the_same_bits(processes, recipe, expected, tmp_path, trial):
    fault, folder = random_fault(trial), tmp_path / "run"
    codes, log = launched(processes, recipe, folder, fault)
    assert all(code != 0 for code in codes), f"{fault} did not strike:\n{log}"
    steps_done = len(metrics(folder)) if (folder / "metrics.jsonl").exists() else 0
    manifests, _ = whole_checkpoints(folder)
    latest = manifests[0].step if manifests else 0
    assert latest >= steps_done - 1, f"{fault}: the checkpoint of step {steps_done - 1} is lost"
    for manifest in manifests:
        require_intact(folder / f"checkpoints/step_{manifest.step}", manifest.files)
    again, log = launched(processes, recipe, folder, None)
    assert again == [0, 0], f"{fault}:\n{log}"
    found = tensors(folder, STEPS)
    assert not [name for name in expected if not torch.equal(expected[name], found[name])]
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (Fault("learn_actor", 1, (1,), 0.0), "rank 1 on .* is gone: it was killed, or its machine lost; it was in"),
        (Fault("reward", 1, (1,), 0.0, "raise"), "rank 1: ArithmeticError: a fault in reward"),
        (Fault("generate", 1, (1,), 0.0, "stop"), "rank 1 on .* has given no sign of life for 20 s; it was in stage"),
    ],
    ids=["killed", "raised", "frozen"],
)
def test_every_rank_ends_and_one_report_says_why(processes, recipe, tmp_path, fault, sentence):
    codes, log = launched(processes, recipe, tmp_path / "run", fault)
    assert codes[0] == 1, log
    code, why = read_status(tmp_path / "run")
    assert code == 1 and re.search(sentence, why), (why, log)
    assert log.count("megarlhf: the run failed: ") == 1, log
    assert "in stage" in log and json.loads((tmp_path / "run/status.json").read_text())["code"] == 1
