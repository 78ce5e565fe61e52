"""The batch scripts are whole: bash reads them, the flags they give exist, and their way of launching works here."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from tests.distributed.pool import free_port
from tests.learning.toy import metrics, write_actor, write_prompts

FOLDER = Path(__file__).parents[2] / "examples/slurm"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.sbatch"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_reads_the_script(name):
    read = subprocess.run(["bash", "-n", FOLDER / name], capture_output=True, text=True)
    assert read.returncode == 0, read.stderr


def test_the_served_reward_is_asked_for_by_flags_that_exist():
    from megarlhf.commands.serve import ServeRun
    from megarlhf.config.fields import dotted_names
    from megarlhf.config.runs import COMMANDS

    script = (FOLDER / "reward_elsewhere.sbatch").read_text()
    served = script[script.index("megarlhf serve") : script.index("asked()")]
    own = {field.name for field in fields(ServeRun)}
    assert set(re.findall(r"--([a-z_]+) ", served)) <= own and "--token_file" in served
    trained = script[script.index('megarlhf "$@"') :]
    assert set(re.findall(r"--([a-z_]+\.[a-z_]+) ", trained)) <= set(dotted_names(COMMANDS["ppo"]))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("hosts")
    write_actor(root / "actor")
    write_prompts(root / "prompts.jsonl", count=8)
    settings = {
        "actor": {"model": str(root / "actor"), "train": {"pp": 2}},
        "reward": {"functions": ["length"]},
        "rollout": {"batch_size": 4, "samples_per_prompt": 2, "max_new_tokens": 6},
        "data": {"prompts": str(root / "prompts.jsonl"), "max_prompt_tokens": 8},
        "run": {"steps": 2, "tensorboard": False},
    }
    (root / "toy.yaml").write_text(yaml.safe_dump(settings))
    return root / "toy.yaml"


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}


def numbers(folder: Path) -> list[dict[str, float]]:
    """The metrics of a run without its times and memory."""
    rows = metrics(folder)
    return [{name: value for name, value in row.items() if not name.startswith(("time/", "memory/"))} for row in rows]


def test_two_torchrun_agents_train_together_as_one_does(recipe):
    """Two machines, as far as torchrun knows: each agent starts one rank, and they meet at a rendezvous."""
    port, root = free_port(), recipe.parent
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    agent += ["--rdzv-id", "7", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "-m", "megarlhf"]
    words = ["grpo", str(recipe), "--run.dir", str(root / "two_agents")]
    agents = [
        subprocess.Popen([*agent, *words], env=environment(), stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for process in agents:
        _, said = process.communicate(timeout=170)
        assert process.returncode == 0, said[-2000:]
    script = (FOLDER / "srun.sbatch").read_text()
    placed = re.search(r"bash -c \\\n\s+'(.*?)' megarlhf", script).group(1)
    assert placed.endswith('python -m megarlhf "$@"')
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SLURM_NTASKS": "2"}
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    words = ["grpo", str(recipe), "--run.dir", str(root / "srun")]
    tasks = [
        subprocess.Popen(
            ["bash", "-c", placed, "megarlhf", *words],
            env=environment() | master | path | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=170) for process in tasks] == [0, 0]
    assert numbers(root / "two_agents") == numbers(root / "srun")
