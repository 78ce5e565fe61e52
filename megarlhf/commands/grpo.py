"""`megarlhf grpo`: train a policy on group-relative rewards (GRPO, Dr. GRPO, DAPO, GSPO)."""

from collections.abc import Sequence

from megarlhf.loop.launch import launch

SUMMARY = "train a policy on group-relative rewards (GRPO, DAPO, GSPO): megarlhf grpo FILE.yaml [--dotted.flags]"


def main(argv: Sequence[str]) -> int:
    """Runs the command on every rank of the launch; returns the exit code."""
    return launch("grpo", argv)
