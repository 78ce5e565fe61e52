"""`megarlhf check`: everything that can be known to be wrong with a recipe, without starting it."""

import logging
from collections.abc import Sequence
from pathlib import Path

from megarlhf.config.check import ranks_needed, warnings
from megarlhf.config.command import command_of, load_for
from megarlhf.config.runs import COMMANDS
from megarlhf.errors import ConfigError

_log = logging.getLogger(__name__)
SUMMARY = "say what is wrong with a recipe: megarlhf check [COMMAND] FILE.yaml [--ranks N] [--dotted.flags]"

_USAGE = f"""usage: {SUMMARY.partition(": ")[2]}

  --ranks  ranks to check for (default: those of this launch, or the fewest that hold whole copies of all models)

Finds what a launch would find before it loads weights: settings, layouts, model folders, tokenizers, data files, reward
functions, room on the disk. COMMAND is the training command that FILE.yaml is for; needed where several would take it.
Exit codes: 0 nothing is wrong, 2 the errors printed."""


def main(argv: Sequence[str]) -> int:
    """Prints what a launch would find, and versions; returns 0 when nothing is wrong. Raises ConfigError otherwise."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if argv else 2
    ranks, words = _ranks(list(argv))
    if not words:
        raise ConfigError(f"check: expected a recipe; {SUMMARY}")
    command = words.pop(0) if words[0] in COMMANDS else command_of(words, "check")
    settings, wrong = load_for(command, words, f"megarlhf check {command}", ["--ranks"])
    if wrong:
        raise ConfigError(wrong)
    from megarlhf import device

    device.prepare()
    from megarlhf.device.versions import versions
    from megarlhf.loop.preflight import preflight
    from megarlhf.loop.reading import hub_data_sets, row_violations

    num_ranks = ranks or max(ranks_needed(settings), device.launched_world_size())
    was_there = Path(settings.run.dir).exists()
    found = preflight(settings, num_ranks, " ".join([command, *words])) or row_violations(settings)
    if not was_there and Path(settings.run.dir).is_dir():
        Path(settings.run.dir).rmdir()  # tried only
    if found:
        raise ConfigError(found)
    for warning in warnings(settings):
        _log.warning(warning)
    print(f"megarlhf {command}: nothing is wrong on {num_ranks} rank{'s' if num_ranks > 1 else ''}")
    for setting, path in hub_data_sets(settings).items():
        print(f"not read: {setting} {path}, which the run downloads")
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
    return 0


def _ranks(words: list[str]) -> tuple[int, list[str]]:
    """The number after --ranks (0: not given), and the other words."""
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--ranks=") else [word])]
    if "--ranks" not in words:
        return 0, words
    at = words.index("--ranks")
    given = words[at + 1] if at + 1 < len(words) else ""
    if not given.isdigit() or int(given) < 1:
        raise ConfigError(f"--ranks: {given!r} is no number of ranks; give a whole number of 1 or more")
    return int(given), words[:at] + words[at + 2 :]
