"""`megarlhf show`: the settings a command would run with, as YAML that can be run again."""

import json
from collections.abc import Sequence

from megarlhf.config.check import require_valid
from megarlhf.config.command import command_of, load_for
from megarlhf.config.load import to_dict, to_yaml
from megarlhf.config.runs import COMMANDS
from megarlhf.errors import ConfigError

SUMMARY = "print a command's resolved settings: megarlhf show [COMMAND] FILE.yaml [--dotted.flags] [--json]"


def main(argv: Sequence[str]) -> int:
    """Prints the settings. Raises ConfigError when they cannot be run."""
    as_json = "--json" in argv
    words = [word for word in argv if word != "--json"]
    if words and words[0] in ("-h", "--help"):
        print(f"usage: {SUMMARY.partition(': ')[2]}\n\n  --json  JSON instead of YAML\n")
        print("What the file and flags leave out is shown with its default. COMMAND, needed where several would take")
        print(f"the file: one of {', '.join(COMMANDS)}.")
        return 0
    if not words:
        raise ConfigError(f"show: expected a recipe, or a command to show, one of {', '.join(COMMANDS)}; {SUMMARY}")
    command = words.pop(0) if words[0] in COMMANDS else command_of(words, "show")
    settings, wrong = load_for(command, words, f"megarlhf show {command}", ["--json"])
    if wrong:
        raise ConfigError(wrong)
    require_valid(settings)
    print(json.dumps(to_dict(settings), indent=2, ensure_ascii=False) if as_json else to_yaml(settings), end="")
    if as_json:
        print()
    return 0
