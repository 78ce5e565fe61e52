"""`megarlhf reinforce++`: train a policy with REINFORCE++."""

from collections.abc import Sequence

from megarlhf.loop.launch import launch

SUMMARY = "train a policy with REINFORCE++: megarlhf reinforce++ FILE.yaml [--dotted.flags]"


def main(argv: Sequence[str]) -> int:
    """Runs the command on every rank of the launch; returns the exit code."""
    return launch("reinforce++", argv)
