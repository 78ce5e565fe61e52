"""The C library's allocator, which serves tensors where there is no GPU: what it has handed out, and giving it back.

glibc only; elsewhere nothing is counted and nothing is changed.
"""

import ctypes
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_OWN_MAPPING_BYTES = 2**20


class _Counts(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libc.so.6")
        library.mallinfo2.restype = _Counts
    except (OSError, AttributeError):
        return None
    return library


def allocated_bytes() -> int:
    """Bytes that are handed out at this moment, by all threads: in heaps, and in mappings of their own."""
    library = _library()
    if library is None:
        return 0
    counts = library.mallinfo2()
    return counts.uordblks + counts.hblkhd


def give_back_when_freed() -> None:
    """From now on what is freed leaves this process at once, if it is of 1 MiB or more.

    glibc otherwise raises the size from which an allocation is a mapping of its own up to 32 MiB as it goes, and
    freed blocks below it stay in heaps that have something living behind them. Costs a page fault per touched page of
    each new block.
    """
    library = _library()
    if library is not None:
        library.mallopt(_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)
        library.mallopt(_TRIM_THRESHOLD, _OWN_MAPPING_BYTES)


def trim() -> None:
    """Give back what is free at the ends of heaps and in whole pages between."""
    library = _library()
    if library is not None:
        library.malloc_trim(0)
