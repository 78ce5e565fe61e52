"""`megarlhf ppo`: train a policy with PPO, a critic and a KL penalty."""

from collections.abc import Sequence

from megarlhf.loop.launch import launch

SUMMARY = "train a policy with PPO, a critic and a KL penalty: megarlhf ppo FILE.yaml [--dotted.flags]"


def main(argv: Sequence[str]) -> int:
    """Runs the command on every rank of the launch; returns the exit code."""
    return launch("ppo", argv)
