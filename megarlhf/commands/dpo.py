"""`megarlhf dpo`: train a policy on preferences without sampling (DPO, IPO)."""

from collections.abc import Sequence

from megarlhf.loop.launch import launch

SUMMARY = "train a policy on preferences without sampling (DPO, IPO): megarlhf dpo FILE.yaml [--dotted.flags]"


def main(argv: Sequence[str]) -> int:
    """Runs the command on every rank of the launch; returns the exit code."""
    return launch("dpo", argv)
