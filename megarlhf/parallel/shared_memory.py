"""Memory that the ranks of one machine share: each writes a box of its own, which the others read without a socket."""

import os
import socket
import tempfile
from typing import BinaryIO, NamedTuple

import torch
import torch.distributed as dist

from megarlhf.parallel.rows import gather_objects

_FOLDER = "/dev/shm"


class _Place(NamedTuple):
    """Where another rank finds a box, and what it finds there."""

    host: str
    path: str
    identity: tuple[int, int]
    """Device and inode: in a container of its own, a rank may have another process of this number."""


def open_boxes(group: dist.ProcessGroup, num_bytes: int) -> list[torch.Tensor] | None:
    """A box of `num_bytes` bytes for each rank of `group` (collective over it): [num_bytes] uint8 each, by rank.

    A rank writes its own only, and says so by a collective before the others read. None, on every rank, where they are
    not all on one machine, or it has no room: the caller then sends messages.
    """
    box = _make_box(num_bytes)
    try:
        places = gather_objects(None if box is None else _place(box), group)
        boxes = _mapped(places, num_bytes)
        # Once all have said so, all have mapped them, and nobody needs to find them any more.
        return boxes if all(gather_objects(boxes is not None, group)) else None
    finally:
        if box is not None:
            box.close()


def _make_box(num_bytes: int) -> BinaryIO | None:
    """A file in memory with room for `num_bytes`; None where there is none.

    It has no name, so that nothing is left of it when its processes are killed.
    """
    try:
        box = tempfile.TemporaryFile(dir=_FOLDER, buffering=0)
    except OSError:
        return None
    try:
        os.posix_fallocate(box.fileno(), 0, num_bytes)  # a write into a file without room would end the process
    except OSError:
        box.close()
        return None
    return box


def _place(box: BinaryIO) -> _Place:
    found = os.fstat(box.fileno())
    return _Place(socket.gethostname(), f"/proc/{os.getpid()}/fd/{box.fileno()}", (found.st_dev, found.st_ino))


def _mapped(places: list[_Place | None], num_bytes: int) -> list[torch.Tensor] | None:
    """All boxes, by rank; None where this rank cannot have them all."""
    found = []
    for place in places:
        if place is None or place.host != socket.gethostname():
            return None
        try:
            there = os.stat(place.path)
            if (there.st_dev, there.st_ino) != place.identity:
                return None
            found.append(torch.from_file(place.path, shared=True, size=num_bytes, dtype=torch.uint8))
        except (OSError, RuntimeError):
            return None
    return found
