"""A launch as its launcher sees it: whole processes, signals to them, exit codes, status.json and what they print."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megarlhf.errors import ConfigError
from megarlhf.loop.launch import launch as launch_here
from megarlhf.telemetry.status import read_status
from tests.distributed.pool import free_port
from tests.learning.toy import write_actor, write_prompts
from tests.loop.kill_ranks import rank_process

pytestmark = pytest.mark.slow
PATIENCE_S = 120


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """More steps than anyone waits for."""
    root = tmp_path_factory.mktemp("launch")
    write_actor(root / "actor")
    write_prompts(root / "prompts.jsonl", count=6)
    settings = {
        "actor": {"model": str(root / "actor"), "train": {"pp": 2}},
        "reward": {"functions": ["tests.loop.plugin:capitals"]},
        "rollout": {"batch_size": 2, "samples_per_prompt": 2, "max_new_tokens": 4},
        "data": {"prompts": str(root / "prompts.jsonl"), "max_prompt_tokens": 8},
        "run": {"steps": 10000, "tensorboard": False},
    }
    (root / "toy.yaml").write_text(yaml.safe_dump(settings))
    return root / "toy.yaml"


class Launch:
    """Two ranks of `megarlhf grpo`, each a process; `extra` are the words that only rank 1 is given."""

    def __init__(self, processes, recipe: Path, folder: Path, *words: str, extra: tuple[str, ...] = ()):
        self.folder, port, self.log = folder, free_port(), folder.with_name("log")
        command = ["grpo", str(recipe), "--run.dir", str(folder), *words]
        self.ranks = []
        for rank in range(2):
            arguments = (rank, 2, port, command + (list(extra) if rank == 1 else []), str(self.log), None)
            self.ranks.append(processes.Process(target=rank_process, args=arguments))
            self.ranks[-1].start()

    def codes(self) -> list[int | None]:
        """Exit codes of the ranks, once they have ended."""
        for rank in self.ranks:
            rank.join(PATIENCE_S)
        found = [rank.exitcode for rank in self.ranks]
        for rank in self.ranks:
            rank.kill()
        return found

    def told(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def await_steps(self) -> None:
        await_steps(self.folder, lambda: all(rank.is_alive() for rank in self.ranks), self.told)


def here() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}


def await_steps(folder: Path, is_alive, told) -> None:
    """Until the run has taken two steps."""
    deadline = time.monotonic() + PATIENCE_S
    file = folder / "metrics.jsonl"
    while not file.exists() or file.read_text().count("\n") < 2:
        assert is_alive() and time.monotonic() < deadline, told()
        time.sleep(0.1)


def test_what_one_rank_lacks_ends_all_with_one_report(processes, recipe, tmp_path):
    launch = Launch(processes, recipe, tmp_path / "run", extra=("--data.prompts", str(tmp_path / "none.jsonl")))
    assert launch.codes() == [2, 2], launch.told()
    assert re.search(r"megarlhf: error: rank 1 on \S+: data.prompts: .*none.jsonl is not there; give", launch.told())
    assert launch.told().count("none.jsonl is not there") == 1
    code, why = read_status(tmp_path / "run")
    assert code == 2 and "rank 1 on" in why


def test_bad_rows_that_all_ranks_find_are_told_once(processes, recipe, tmp_path):
    (tmp_path / "odd.jsonl").write_text('{"prompt": "a"}\nnot json\n[1]\n')
    launch = Launch(processes, recipe, tmp_path / "run", "--data.prompts", str(tmp_path / "odd.jsonl"))
    assert launch.codes() == [2, 2], launch.told()
    told = [line.partition("odd.jsonl")[2] for line in launch.told().splitlines() if "odd.jsonl" in line]
    assert len(told) == 2 and told[0].startswith(":2: not JSON") and told[1].startswith(":3: the line is a list")
    assert re.search(r"odd.jsonl:2: .*\n.*odd.jsonl:3", read_status(tmp_path / "run")[1])


def test_what_all_ranks_raise_together_is_told_once(processes, recipe, tmp_path):
    launch = Launch(processes, recipe, tmp_path / "run", "--reward.functions", "tests.loop.plugin:failing")
    assert launch.codes() == [1, 1], launch.told()
    told = launch.told()
    assert "\nmegarlhf: error: rank 0: reward function" in told and "the run failed" not in told, told
    assert [told.count(f"rank {rank}: reward function") for rank in range(2)] == [1, 1], told
    code, why = read_status(tmp_path / "run")
    assert code == 1 and re.match(r"rank \d: reward function tests.loop.plugin:failing raised ArithmeticError", why)


def test_a_start_that_is_refused_leaves_the_status_of_the_run_that_has_the_folder(processes, recipe, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "status.json").write_text('{"code": null, "reason": "running"}')
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="rollout.batch_size"):
            launch_here("grpo", [str(recipe), "--run.dir", str(folder), "--rollout.batch_size", "-2"])
        assert read_status(folder) == (None, "running")
        launch = Launch(processes, recipe, folder)
        assert launch.codes() == [2, 2] and "is being written by another run" in launch.told(), launch.told()
        assert read_status(folder) == (None, "running")
    with pytest.raises(ConfigError, match="rollout.batch_size"):
        launch_here("grpo", [str(recipe), "--run.dir", str(folder), "--rollout.batch_size", "-2"])
    assert read_status(folder)[0] == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "SIGUSR1"])
def test_a_signal_to_one_rank_saves_and_asks_to_be_started_again(processes, recipe, tmp_path, number):
    launch = Launch(processes, recipe, tmp_path / "run")
    launch.await_steps()
    os.kill(launch.ranks[1].pid, number)
    assert launch.codes() == [75, 75], launch.told()
    code, why = read_status(tmp_path / "run")
    assert code == 75 and re.fullmatch(rf"requeue: stopped by {number.name} after saving step \d+; the same .*", why)
    assert launch.told().count(why) == 1
    step = int(re.search(r"step (\d+)", why)[1])
    assert (tmp_path / f"run/checkpoints/step_{step}").is_dir()


def test_a_stage_that_takes_too_long_ends_all_ranks_and_is_named(processes, recipe, tmp_path):
    launch = Launch(
        processes,
        recipe,
        tmp_path / "run",
        "--run.stage_timeout_minutes",
        "0.2",
        "--reward.functions",
        "tests.loop.plugin:asleep",
    )
    assert launch.codes() == [1, 1], launch.told()
    code, why = read_status(tmp_path / "run")
    sentence = r"rank \d: stage reward has taken \d+ s, more than run.stage_timeout_minutes 0.2; it is at \S+:\d+ \(.*"
    assert code == 1 and re.search(sentence, why), (why, launch.told())
    assert launch.told().count("megarlhf: the run failed: ") == 1


def both_ends(first: list[str], second: list[str], **environment: str) -> tuple[set[int], str]:
    """How two ranks of a launch end, the second with an `environment` of its own: exit codes and standard error."""
    common = os.environ | here() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = []
    for rank, words in enumerate((first, second)):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | (environment if rank else {})
        command = [sys.executable, "-m", "megarlhf", *words]
        started.append(subprocess.Popen(command, env=common | own, stderr=subprocess.PIPE, text=True))
    told = [process.communicate(timeout=PATIENCE_S)[1] for process in started]
    return {process.returncode for process in started}, "".join(told)


def test_a_package_that_one_rank_may_not_have_ends_all_with_one_report(recipe, tmp_path):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").write_text("")
    command = ["grpo", str(recipe), "--run.dir", str(tmp_path / "run")]
    codes, told = both_ends(command, command, PYTHONPATH=f"{tmp_path}:{os.getcwd()}")
    assert codes == {2} and read_status(tmp_path / "run")[0] == 2
    assert re.match(r"megarlhf: error: rank 1 on \S+: the package apex at \S+ is not NVIDIA's", told)
    assert told.count("not NVIDIA's") == 1


def test_what_one_rank_of_generate_lacks_ends_all_with_one_report(recipe, tmp_path):
    prompts = recipe.with_name("prompts.jsonl")
    (tmp_path / "odd").write_text('{"prompt": "a"}\nnot json\n')
    command = ["generate", str(recipe.with_name("actor")), "--out", str(tmp_path / "out"), "--prompts"]
    wrong = {"none": r"error: rank 1 on \S+: --prompts: \S+/none does not exist", "odd": "odd:2: not JSON"}
    for name, complaint in wrong.items():
        codes, told = both_ends([*command, str(prompts)], [*command, str(tmp_path / name)])
        assert codes == {2} and len(re.findall(complaint, told)) == 1, told


def test_an_interrupted_torchrun_leaves_no_rank_behind(recipe, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "megarlhf", "grpo", str(recipe), "--run.dir", str(folder)]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | here(), start_new_session=True)
    try:
        await_steps(folder, lambda: process.poll() is None, log.read_text)
        ranks = children(process.pid)
        assert len(ranks) == 2
        start = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # a terminal tells everyone
        assert process.wait(30) != 0 and time.monotonic() - start < 15
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    ours = [line for line in log.read_text().splitlines() if line.startswith("megarlhf: ")]
    assert 1 <= len(ours) <= 2 and all("interrupted" in line for line in ours), log.read_text()
    assert read_status(folder)[0] not in (0, None)


def test_an_interrupted_process_ends_at_once_and_leaves_nothing_behind(recipe, tmp_path):
    """One process without a launcher, in a reward function that would take ten minutes."""
    folder, log, temporary = tmp_path / "run", tmp_path / "log", tmp_path / "temporary"
    temporary.mkdir()
    words = ["--actor.train.pp", "1", "--reward.functions", "tests.loop.plugin:asleep", "--run.dir", str(folder)]
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "megarlhf", "ppo", str(recipe), *words],
            stdout=file,
            stderr=file,
            env=os.environ | here() | {"TMPDIR": str(temporary)},
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )
    try:
        await_steps(folder, lambda: process.poll() is None, log.read_text)
        time.sleep(1)  # the fourth step has come
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(10) == 130
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert log.read_text().endswith("\nmegarlhf: error: interrupted\n"), log.read_text()
    assert read_status(folder) == (130, "interrupted")
    assert not list(temporary.iterdir())


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
