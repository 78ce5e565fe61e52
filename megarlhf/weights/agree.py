"""Failing together: a problem that one rank found is raised on every rank, so that none waits forever."""

import torch.distributed as dist

from megarlhf.errors import CheckpointError, MegarlhfError
from megarlhf.parallel.rows import gather_objects


def raise_together(problem: str | None, group: dist.ProcessGroup, kind: type[MegarlhfError] = CheckpointError) -> None:
    """Collective over `group`. Raises an error of that kind on all of its ranks when any of them has a problem."""
    found = list(dict.fromkeys(text for text in gather_objects(problem, group) if text is not None))
    if found:
        raise kind("\n".join(found))
