"""The command line: commands, help, exit codes and how errors look."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megarlhf import cli, commands
from megarlhf.config.load import load
from megarlhf.config.settings import PPORun

NEEDED = "--actor.model m --data.prompts p.jsonl --reward.functions length".split()


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A function that adds a command `extra` with the given body to those the command line finds."""

    def add(body: str) -> None:
        (tmp_path / "extra.py").write_text(f'SUMMARY = "an extra one"\n\n\ndef main(argv):\n    {body}\n')
        monkeypatch.setattr(commands, "__path__", [str(tmp_path)])
        monkeypatch.delitem(sys.modules, "megarlhf.commands.extra", raising=False)

    yield add
    sys.modules.pop("megarlhf.commands.extra", None)


def test_help_lists_every_command_with_its_line(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    names = {path.stem for path in Path(commands.__path__[0]).glob("*.py")} - {"__init__"}
    spelled = [name.replace("_plus_plus", "++").replace("_", "-") for name in names]
    assert names >= {"show"} and all(f"  {name} " in shown for name in spelled)


def test_help_is_quick_because_it_imports_nothing_heavy():
    code = "import sys; from megarlhf.cli import main; main(['--help']); print(sorted(sys.modules))"
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert time.perf_counter() - start < 5
    assert not {"'torch'", "'transformers'", "'megatron'", "'tyro'"} & set(result.stdout.strip("[]\n").split(", "))


def test_wrong_settings_are_told_before_torch_is_loaded(tmp_path):
    (tmp_path / "wrong.yaml").write_text("actor: {modle: m}\n")
    (tmp_path / "unfinished.yaml").write_text("actor: {model: nowhere, train: {tp: 2}}\n")
    code = "import sys; from megarlhf.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    for words, told in (
        (["ppo", "wrong.yaml"], "wrong.yaml:1: actor.modle: no such setting; did you mean actor.model?"),
        (["grpo", "unfinished.yaml"], "data.prompts: is not set; give a path"),
        (["sft"], "sft: which recipe? Give a YAML file: megarlhf sft FILE.yaml"),
    ):
        command = [sys.executable, "-c", code, *words]
        here = os.environ | {"PYTHONPATH": os.getcwd()}
        result = subprocess.run(command, cwd=tmp_path, env=here, capture_output=True, text=True)
        assert result.stdout == "2 False\n" and told in result.stderr


def test_without_a_command_help_is_shown_and_the_code_is_two(capsys):
    assert cli.main([]) == 2
    assert "usage: megarlhf COMMAND" in capsys.readouterr().out


def test_a_mistyped_command_gets_a_suggestion(capsys):
    assert cli.main(["shwo"]) == 2
    assert capsys.readouterr().err == "megarlhf: error: shwo: no such command; did you mean show?\n"
    assert cli.main(["reinforce"]) == 2
    assert capsys.readouterr().err.endswith("did you mean reinforce++?\n")
    assert cli.main(["qqqq"]) == 2
    assert "grpo, " in (told := capsys.readouterr().err) and "reinforce++" in told and "plus" not in told


def test_every_violation_has_a_line_and_there_is_no_traceback(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("run:\n  stesp: 3\nactor:\n  dtype: int8\n")
    assert cli.main(["show", "ppo", str(path)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and "mine.yaml:2: run.stesp: no such setting; did you mean run.steps?" in told[0]


def test_debug_adds_the_traceback(capsys):
    assert cli.main(["show", "ppo", "--debug"]) == 2
    told = capsys.readouterr().err
    assert "Traceback" in told and "megarlhf: error: actor.model: is not set" in told


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ("return 0", 0, ""),
        ("return 1", 1, ""),
        ("raise KeyboardInterrupt", 130, "megarlhf: error: interrupted"),
        ("from megarlhf.errors import RewardError; raise RewardError('no score')", 1, "megarlhf: error: no score\n"),
        ("from megarlhf.errors import DataError; raise DataError('row 7')", 2, "megarlhf: error: row 7\n"),
        ("from megarlhf.errors import DataError; raise DataError('1\\n2')", 2, "rror: 1\nmegarlhf: error: 2\n"),
        ("1 / 0", 1, "Traceback"),
    ],
)
def test_how_a_command_ends_is_the_exit_code(command, capsys, body, code, told):
    command(body)
    assert cli.main(["extra"]) == code
    assert told in capsys.readouterr().err


def test_one_rank_of_each_machine_tells_the_settings_errors(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("MASTER_PORT", "first")
    assert cli.main(["show", "ppo"]) == 2
    assert "megarlhf: error: actor.model" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert cli.main(["show", "ppo"]) == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("MASTER_PORT", "second")
    assert cli.main(["show", "ppo"]) == 2
    assert "megarlhf: error: actor.model" in capsys.readouterr().err


def test_show_prints_settings_that_run_again(tmp_path, capsys):
    flags = [*NEEDED, "--algorithm.lambda", "0.9", "--critic.train.tp", "2"]
    assert cli.main(["show", "ppo", *flags]) == 0
    path = tmp_path / "shown.yaml"
    path.write_text(capsys.readouterr().out)
    assert load(PPORun, path, []) == load(PPORun, None, flags)
    assert cli.main(["show", "ppo", str(path)]) == 0
    assert capsys.readouterr().out == path.read_text()


def test_show_finds_the_command_as_check_does(tmp_path, capsys):
    assert cli.main(["show", "examples/quickstart.yaml", "--run.seed", "7"]) == 0
    found = capsys.readouterr().out
    assert cli.main(["show", "ppo", "examples/quickstart.yaml", "--run.seed", "7"]) == 0
    assert capsys.readouterr().out == found
    (tmp_path / "either.yaml").write_text("run: {seed: 1}\n")
    assert cli.main(["show", str(tmp_path / "either.yaml")]) == 2
    assert "say which: megarlhf show " in capsys.readouterr().err


def test_show_as_json_holds_the_same_values(capsys):
    cli.main(["show", "ppo", *NEEDED])
    shown = yaml.safe_load(capsys.readouterr().out)
    assert cli.main(["show", "ppo", *NEEDED, "--json"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert as_json["rollout"] == shown["rollout"] and as_json["actor"]["optimizer"]["learning_rate"] == 1e-6


@pytest.mark.parametrize("words", [["show"], ["show", "pop"], ["show", "ppo", "nowhere.yaml"]])
def test_show_without_something_to_show_is_code_two(words, capsys):
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith("megarlhf: error: ")


def test_python_m_ends_with_the_same_code():
    result = subprocess.run([sys.executable, "-m", "megarlhf", "shwo"], capture_output=True, text=True)
    assert result.returncode == 2 and "did you mean show?" in result.stderr


def test_what_packages_print_themselves_is_printed_once():
    code = (
        "from megarlhf import cli; cli.main(['--version']); from huggingface_hub.utils import logging;"
        "logging.get_logger('huggingface_hub.a').warning('retrying')"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    assert told.count("retrying") == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_ends_without_a_traceback(unbuffered):
    words = [sys.executable, "-m", "megarlhf", "--help"]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in (0, 141)  # 0: all of it was still in the buffer


def test_a_failure_does_not_wait_for_threads_that_are_left(tmp_path):
    (tmp_path / "extra.py").write_text(
        "import threading, time\nfrom megarlhf.errors import DataError\nSUMMARY = 'fails'\n\n\ndef main(argv):\n"
        "    threading.Thread(target=time.sleep, args=(60,)).start()\n    raise DataError('row 7')\n"
    )
    code = f"from megarlhf import cli, commands; commands.__path__ = [{str(tmp_path)!r}]; cli.run()"
    result = subprocess.run([sys.executable, "-c", code, "extra"], capture_output=True, text=True, timeout=30)
    assert result.returncode == 2 and result.stderr == "megarlhf: error: row 7\n"


def test_a_launcher_hears_once_and_at_once_what_is_wrong():
    """The first rank is slower by far: the other tells, without waiting for it."""
    slow = "import os, time; time.sleep(60 * (os.environ['RANK'] == '0')); from megarlhf import cli; cli.run()"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--no-python"]
    command = [*launcher, sys.executable, "-c", slow, "shwo"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=50).stderr.count("did you mean show?") == 1
