"""`megarlhf plan`: what a run would take, before there is a GPU or a weight."""

from collections.abc import Sequence

from megarlhf.loop.planner.command import plan_command

SUMMARY = "memory, messages and time of a run before it is one: megarlhf plan FILE.yaml [--ranks N --gpu h100 --search]"


def main(argv: Sequence[str]) -> int:
    """Prints the plan; returns 0 when it fits, 1 when it does not, 2 when the settings break a rule."""
    return plan_command(argv)
