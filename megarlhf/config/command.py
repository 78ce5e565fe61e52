"""Which training command a recipe is for, where it is not said: the one that takes all of its settings."""

from collections.abc import Sequence

from megarlhf.config.load import file_and_flags, load_leniently
from megarlhf.config.runs import COMMANDS
from megarlhf.errors import ConfigError


def command_of(words: Sequence[str], asker: str) -> str:
    """The one command that takes every setting of a file and flags; when none does, the one that refuses fewest.

    `asker`: the command that wants to know, for the sentence. Raises ConfigError when several take all of them.
    """
    file, flags = file_and_flags(words)
    wrong = {
        name: load_leniently(kind, file, flags, prog=f"megarlhf {asker} {name}")[1] for name, kind in COMMANDS.items()
    }
    fitting = [name for name, found in wrong.items() if not found]
    if len(fitting) > 1:
        recipe = file or "FILE.yaml"
        raise ConfigError(
            f"{asker}: {recipe} could be for {', '.join(fitting)}; say which: megarlhf {asker} {fitting[0]} {recipe}"
        )
    return min(wrong, key=lambda name: len(wrong[name]))
