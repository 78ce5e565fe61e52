"""Memory that the ranks of one machine share: each writes a box of its own, which the others read without a socket."""

import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from megarlhf.parallel.rows import gather_objects

_FOLDER = Path("/dev/shm")


def open_boxes(group: dist.ProcessGroup, num_bytes: int) -> list[torch.Tensor] | None:
    """A box of `num_bytes` bytes for each rank of `group` (collective over it): [num_bytes] uint8 each, by rank.

    A rank writes its own only, and says so by a collective before the others read. None, on every rank, where they are
    not all on one machine, or it has no room: the caller then sends messages.
    """
    path = _make_box(num_bytes)
    try:
        paths = gather_objects((socket.gethostname(), path), group)
        boxes = _mapped([each for _, each in paths], num_bytes) if len({host for host, _ in paths}) == 1 else None
        # Once all have said so, all have mapped them, and nobody needs their names any more.
        return boxes if all(gather_objects(boxes is not None, group)) else None
    finally:
        if path is not None:
            path.unlink()


def _make_box(num_bytes: int) -> Path | None:
    """A file in memory with room for `num_bytes`; None where there is none."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="megarlhf-", dir=_FOLDER)
    except OSError:
        return None
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # a write into a file without room would end the process
    except OSError:
        os.unlink(name)
        return None
    finally:
        os.close(descriptor)
    return Path(name)


def _mapped(paths: list[Path | None], num_bytes: int) -> list[torch.Tensor] | None:
    """All boxes, by rank; None where this rank cannot have them all."""
    if not all(path is not None and path.exists() for path in paths):
        return None
    try:
        return [torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8) for path in paths]
    except RuntimeError:
        return None
