"""Which training command a recipe is for, where it is not said or said wrong: the one that takes all its settings."""

from collections.abc import Collection, Sequence
from pathlib import Path

from megarlhf.config.load import files_and_flags, load_leniently
from megarlhf.config.runs import COMMANDS, AnyRun, OfflineRun, RewardModelRun
from megarlhf.errors import ConfigError

OWN_FLAGS = ("--dry-run", "--json", "--profile")
"""Of every training command, beside its settings."""


def command_of(words: Sequence[str], asker: str) -> str:
    """The one command that takes every setting of files and flags; when none does, the one that refuses fewest.

    `asker`: the command that wants to know, for the sentence. Raises ConfigError when several take all of them.
    """
    files, flags = files_and_flags(words)
    likely, wrong = _likeliest(files, flags, asker)
    fitting = [name for name in likely if not wrong[name]]
    if len(fitting) > 1:
        recipe = " ".join(files) or "FILE.yaml"
        raise ConfigError(
            f"{asker}: {recipe} could be for {', '.join(fitting)}; say which: megarlhf {asker} {fitting[0]} {recipe}"
        )
    return (fitting or likely)[0]


def _likeliest(files: Sequence[str], flags: Sequence[str], asker: str) -> tuple[list[str], dict[str, list[str]]]:
    """The commands that know most of the settings, first the one that a file is named after; and what is wrong with
    files and flags for each command."""
    wrong = {
        name: load_leniently(kind, files, flags, prog=f"megarlhf {asker} {name}")[1] for name, kind in COMMANDS.items()
    }
    fewest = min(map(num_unknown, wrong.values()))
    likely = [name for name in COMMANDS if num_unknown(wrong[name]) == fewest]
    return sorted(likely, key=lambda name: not any(name in Path(file).stem for file in files)), wrong


def load_for(
    command: str, words: Sequence[str], prog: str, own_flags: Collection[str] = ()
) -> tuple[AnyRun, list[str]]:
    """Settings of a command called as `FILE.yaml ... [--dotted.flags]`, and what is wrong, as `load_leniently` says it.

    For a recipe of another command that comes first, and in place of its settings that are unknown here.
    """
    files, flags = files_and_flags(words)
    settings, found = load_leniently(COMMANDS[command], files, flags, prog, own_flags)
    return settings, (_other_command(command, files, found) if files and num_unknown(found) else found)


def num_unknown(violations: Sequence[str]) -> int:
    """How many of them are settings that do not exist."""
    return sum("no such setting" in line for line in violations)


def _other_command(command: str, files: Sequence[str], found: list[str]) -> list[str]:
    likely, wrong = _likeliest(files, [], command)
    if 4 * num_unknown(wrong[likely[0]]) >= num_unknown(wrong[command]):
        return found
    others = f" (or {', '.join(likely[1:])})" if likely[1:] else ""
    words = " ".join(files)
    told = f"{words} is a recipe for {likely[0]}{others}, not for {command}: megarlhf {likely[0]} {words}"
    return [told, *wrong[likely[0]]]


def no_recipe(command: str) -> str:
    """What to say to somebody who gave a training command nothing."""
    return (
        f"{command}: which recipe? Give a YAML file: megarlhf {command} FILE.yaml [--dotted.flags]. It needs "
        f"{_needed(command)}; examples/ in the repository has some to start from, and megarlhf {command} --help "
        "explains every setting"
    )


def how_to_call(command: str) -> str:
    """What a training command's help opens with, before its settings."""
    return f"""megarlhf {command} FILE.yaml [--dotted.flags] [--dry-run] [--json] [--profile]
torchrun --nproc-per-node N -m megarlhf {command} FILE.yaml ...    (several ranks)

FILE.yaml holds the settings listed below in sections; flags override single ones: `--run.seed 1` is `run: {{seed: 1}}`.
Needed: {_needed(command)}. All else has a default.
`--dry-run` prints what the run would take and starts nothing; `--json` prints each step's metrics as a JSON line;
`--profile` writes a trace of the second step.
"""


def _needed(command: str) -> str:
    kind = COMMANDS[command]()
    if isinstance(kind, OfflineRun):
        return f"{'reward' if isinstance(kind, RewardModelRun) else 'actor'}.model and data.path"
    return "actor.model and data.prompts, and reward.functions or reward.model"
