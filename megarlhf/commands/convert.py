"""`megarlhf convert`: checkpoints between Hugging Face and megatron-core, by the tools of `checkpoints_tools`."""

import importlib
from collections.abc import Sequence

from megarlhf.errors import ConfigError

SUMMARY = "convert, lay out, inspect, compare checkpoints: megarlhf convert hf-to-megatron SRC DST [--tp 4 --pp 2]"
TOOLS = ("hf-to-megatron", "megatron-to-hf", "relayout", "inspect", "compare")


def main(argv: Sequence[str]) -> int:
    """Runs one of TOOLS; returns its exit code. Raises ConfigError for another word."""
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: megarlhf convert {{{','.join(TOOLS)}}} ...    (each has --help)")
        return 0
    if not argv or argv[0] not in TOOLS:
        raise ConfigError(f"convert: expected a tool, one of {', '.join(TOOLS)}; {SUMMARY}")
    from checkpoints_tools import command

    tool = importlib.import_module(f"checkpoints_tools.{argv[0].replace('-', '_')}")
    return command.guarded(tool.main, argv[1:])
