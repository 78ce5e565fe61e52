"""`megarlhf rm`: train a reward model from preferences or scores."""

from collections.abc import Sequence

from megarlhf.loop.launch import launch

SUMMARY = "train a reward model from preferences or scores: megarlhf rm FILE.yaml [--dotted.flags]"


def main(argv: Sequence[str]) -> int:
    """Runs the command on every rank of the launch; returns the exit code."""
    return launch("rm", argv)
