"""`megarlhf sft`: fine-tune on demonstrations or plain text."""

from collections.abc import Sequence

from megarlhf.loop.launch import launch

SUMMARY = "fine-tune on demonstrations or plain text: megarlhf sft FILE.yaml [--dotted.flags]"


def main(argv: Sequence[str]) -> int:
    """Runs the command on every rank of the launch; returns the exit code."""
    return launch("sft", argv)
