"""Memory that is freed goes back to the system at once, so that a long conversion stays as small as a short one."""

import ctypes

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 2**20


def give_back_freed_memory() -> None:
    """Take large blocks from the system one by one, for this process (glibc; elsewhere nothing changes).

    glibc else takes blocks of up to 32 MiB from its heap once it has seen one, and small objects between them keep the
    heap from shrinking: 1 GiB and more after some hundred tensors.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        adjust(_M_MMAP_THRESHOLD, _LARGE_BYTES)
