"""One writer per run folder: a lock that the system lets go when its process ends, however it ends."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

LOCK_NAME = ".lock"


@contextmanager
def locked(run_folder: Path, group: "dist.ProcessGroup") -> Iterator[None]:
    """Holds the folder's lock on the first rank while the block runs. Collective over `group` on entry; raises
    CheckpointError on all of its ranks when another run holds it."""
    import torch.distributed as dist  # here, as `is_held` is asked before torch is imported

    from megarlhf.weights.agree import raise_together

    problem, handle = None, -1
    if dist.get_rank(group) == 0:
        handle, problem = _take(run_folder / LOCK_NAME)
    try:
        raise_together(problem, group)
        yield
    finally:
        if handle >= 0:
            os.close(handle)


def is_held(run_folder: Path) -> bool:
    """Whether a process has the folder's lock; this one's own counts too."""
    try:
        with (run_folder / LOCK_NAME).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such folder, or no locks on its file system
        return False
    return False


def _take(path: Path) -> tuple[int, str | None]:
    handle = -1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 200).decode(errors="replace") or "a process that did not say which"
        os.close(handle)
        return -1, f"run.dir: {path.parent} is being written by another run ({holder}); wait for it, or choose another"
    except OSError as problem:
        if handle >= 0:
            os.close(handle)
        return -1, f"run.dir: {path}: cannot be locked ({problem.strerror}); choose a folder that can be written"
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return handle, None
