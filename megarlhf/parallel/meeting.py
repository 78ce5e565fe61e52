"""Where ranks that share memory wait for each other: in a microsecond or two, where gloo's barrier takes 500."""

import ctypes
import os
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

_LINE_BYTES = 64
"""Of a processor's cache; holds a semaphore (32 bytes on Linux), or a process's number."""
_TRIES = 200
"""Of a semaphore before the processor is left to others: some 0.1 ms."""
_NAPS_S = 1e-4, 1e-2
"""Shortest and longest sleep between later tries: a sixteenth of what was waited."""
_LOOK_S = 1.0
"""How often a rank that waits sees whether the other still runs."""


class Meeting:
    """A POSIX semaphore for each two ranks and direction: what a rank has written before, all see afterwards."""

    def __init__(self, rank: int, corners: Sequence[torch.Tensor], timeout_s: float = 1800.0):
        """`corners` [num_bytes(ranks)] uint8 are shared, by rank. The ranks meet in another way between this and
        their first `wait`."""
        self.rank, self.timeout_s = rank, timeout_s
        self._corners = corners
        self._others = [other for other in range(len(corners)) if other != rank]
        process(corners[rank]).value = os.getpid()
        for other in self._others:
            assert _library().sem_init(self._seat(rank, other), 1, 0) == 0, "no semaphores between processes"

    @staticmethod
    def num_bytes(num_ranks: int) -> int:
        """Shared memory of one rank."""
        return _LINE_BYTES * (1 + num_ranks)

    def wait(self) -> None:
        """Returns when all ranks have come (collective over them).

        Raises RuntimeError, in the words of gloo, when one has ended, or does not come within `timeout_s`.
        """
        post = _library().sem_post
        for other in self._others:
            post(self._seat(other, self.rank))
        for other in self._others:
            self._take(other)

    def _seat(self, owner: int, guest: int) -> int:
        """Address of the semaphore on which `owner` waits for `guest`."""
        return self._corners[owner].data_ptr() + _LINE_BYTES * (1 + guest)

    def _take(self, other: int) -> None:
        take, seat = _library().sem_trywait, self._seat(self.rank, other)
        for _ in range(_TRIES):
            if take(seat) == 0:
                return
        start = looked = time.monotonic()
        while take(seat) != 0:
            time.sleep(min(max((time.monotonic() - start) / 16, _NAPS_S[0]), _NAPS_S[1]))
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                self._require_alive(other, now - start)

    def _require_alive(self, other: int, waited_s: float) -> None:
        """The words before the colons are a backend's: by them a run knows that another rank is the cause."""
        number = process(self._corners[other]).value
        if has_ended(number):
            raise RuntimeError(f"connection closed by peer: rank {other} of the group (process {number}) has ended")
        if waited_s > self.timeout_s:
            raise RuntimeError(
                f"Timed out: rank {other} of the group (process {number}) did not come in {self.timeout_s:g} s"
            )


def process(corner: torch.Tensor) -> ctypes.c_int64:
    """The number of the process that a corner belongs to, in place."""
    return ctypes.c_int64.from_address(corner.data_ptr())


def has_ended(number: int) -> bool:
    """The process of this number is gone, or waits to be forgotten by its parent."""
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.sem_init.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
    library.sem_post.argtypes = library.sem_trywait.argtypes = (ctypes.c_void_p,)
    return library
