"""`megarlhf kto`: train a policy on answers judged one by one (KTO)."""

from collections.abc import Sequence

from megarlhf.loop.launch import launch

SUMMARY = "train a policy on answers judged one by one (KTO): megarlhf kto FILE.yaml [--dotted.flags]"


def main(argv: Sequence[str]) -> int:
    """Runs the command on every rank of the launch; returns the exit code."""
    return launch("kto", argv)
