"""Failing together: a problem that one rank found is raised on every rank, so that none waits forever."""

import torch.distributed as dist

from megarlhf.errors import CheckpointError


def raise_together(problem: str | None, group: dist.ProcessGroup) -> None:
    """Collective over `group`. Raises CheckpointError on all of its ranks when any of them has a problem."""
    problems: list[str | None] = [None] * group.size()
    dist.all_gather_object(problems, problem, group=group)
    found = list(dict.fromkeys(text for text in problems if text is not None))
    if found:
        raise CheckpointError("\n".join(found))
