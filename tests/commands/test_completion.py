"""A shell that has read the script completes commands, flags and values: bash is asked, as its Tab key would."""

import subprocess
from pathlib import Path

import pytest

from megarlhf.cli import main
from megarlhf.commands import command_summaries
from megarlhf.config.fields import dotted_names
from megarlhf.config.runs import COMMANDS


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "megarlhf.bash"
    (path.parent / "megatron").mkdir()
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert main(["completion", "bash"]) == 0
    return path


def completed(script: Path, *words: str) -> list[str]:
    """What Tab offers after the last of the words, in an interactive shell's way of asking."""
    quoted = " ".join(f"'{word}'" for word in ("megarlhf", *words))
    ask = f'COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _megarlhf; printf "%s\\n" "${{COMPREPLY[@]}}"'
    shell = ["bash", "--norc", "-c", f'source "{script}"; {ask}']
    told = subprocess.run(shell, capture_output=True, text=True, cwd=script.parent)
    assert not told.stderr
    return told.stdout.split()


def test_bash_takes_the_function_for_megarlhf(script):
    told = subprocess.run(["bash", "-c", f'source "{script}"; complete -p megarlhf'], capture_output=True, text=True)
    assert told.stdout.strip() == "complete -o filenames -F _megarlhf megarlhf"


def test_every_command_is_offered(script):
    assert set(completed(script, "")) == {name.replace("-plus-plus", "++") for name in command_summaries()}
    assert completed(script, "rep") == ["replay", "report"]


def test_every_setting_of_a_training_command_is_offered(script):
    for name, cls in COMMANDS.items():
        flags, settings = set(completed(script, name, "my.yaml", "--")), list(dotted_names(cls))
        leaves = {one for one in settings if not any(other.startswith(f"{one}.") for other in settings)}
        assert {f"--{leaf}" for leaf in leaves} | {"--dry-run", "--help", "--json", "--profile"} == flags


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ppo", "a.yaml", "--actor.dtype", ""], ["bfloat16", "float32"]),
        (["ppo", "a.yaml", "--actor.train.sp", "t"], ["true"]),
        (["serve", "folder", "--role", "ref"], ["reference"]),
        (["convert", "megat"], ["megatron-to-hf"]),
        (["convert", "inspect", "folder", "--fi"], ["--fingerprint"]),
        (["plan", "grpo", "a.yaml", "--sear"], ["--search"]),
        (["plan", "grpo", "a.yaml", "--rollout.batch"], ["--rollout.batch_size"]),
        (["check", "rei"], ["reinforce++"]),
        (["check", "a.yaml", "--h"], ["--help"]),
        (["convert", "inspect", "--he"], ["--help"]),
        (["check", "sft", "a.yaml", "--actor.dtype", "b"], ["bfloat16"]),
        (["ppo", "megarl"], ["megarlhf.bash"]),
        (["convert", ""], ["compare", "hf-to-megatron", "inspect", "megatron-to-hf", "relayout"]),
        (["convert", "relayout", "meg"], ["megatron"]),
        (["generate", "me"], ["megatron"]),
        (["replay", "me"], ["megatron"]),
        (["generate", "megatron", "--prompts", "meg"], ["megarlhf.bash", "megatron"]),
        (["completion", ""], ["bash", "fish", "zsh"]),
    ],
)
def test_words_are_completed(script, words, offered):
    assert sorted(completed(script, *words)) == offered


def test_the_other_shells_scripts_name_the_same_words(capsys):
    for shell, flag in (("zsh", "--actor.dtype"), ("fish", "-l actor.dtype -x -a 'float32 bfloat16'")):
        assert main(["completion", shell]) == 0
        shown = capsys.readouterr().out
        assert flag in shown and all(name.replace("-plus-plus", "++") in shown for name in command_summaries())
