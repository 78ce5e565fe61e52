"""Device memory, pinned host buffers and copies beside the computation; without a GPU the host's allocator counts."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from megarlhf.device import host
from megarlhf.device.setup import has_gpu


def synchronize() -> None:
    """Wait until the device has done everything asked of it (so that wall-clock times are true)."""
    if has_gpu():
        torch.cuda.synchronize()


def empty_cache() -> None:
    """Give freed device memory back to the driver (without a GPU: to the system), so that others can have it."""
    if has_gpu():
        torch.cuda.empty_cache()
    else:
        host.trim()


def return_freed_memory() -> None:
    """Whoever moves models out of memory wants it back at once; without a GPU this changes the host's allocator."""
    if not has_gpu():
        host.give_back_when_freed()


def memory_allocated_bytes() -> int:
    """Bytes of live tensors on the device; without a GPU all that this process's allocator has handed out."""
    return torch.cuda.memory_allocated() if has_gpu() else host.allocated_bytes()


def is_host() -> bool:
    """The device's memory is the host's."""
    return not has_gpu()


class PeakMeter:
    """The most memory that was allocated at once while a block ran: `with meter: ...; meter.peak_bytes`.

    A GPU's allocator keeps the peak. Without a GPU it is sampled from a thread every 20 ms, and at both ends.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "PeakMeter":
        self.peak_bytes = memory_allocated_bytes()
        if has_gpu():
            torch.cuda.reset_peak_memory_stats()
        else:
            self._done.clear()
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            self.peak_bytes = torch.cuda.max_memory_allocated()
            return
        self._done.set()
        self._thread.join()
        self._thread = None
        self._look()

    def _sample(self) -> None:
        while not self._done.wait(0.02):
            self._look()

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, memory_allocated_bytes())


@cache
def _copy_stream() -> "torch.cuda.Stream":
    return torch.cuda.Stream()


@contextmanager
def beside_computation() -> Iterator[None]:
    """Copies asked for in the block (between the device and pinned memory, non_blocking) run on a stream of their own,
    after what was asked of the device before. Without a GPU they just run."""
    if not has_gpu():
        yield
        return
    _copy_stream().wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(_copy_stream()):
        yield


def copies_are_next() -> None:
    """What is asked of the device from now on starts after the copies beside it."""
    if has_gpu():
        torch.cuda.current_stream().wait_stream(_copy_stream())


def wait_for_copies() -> None:
    """Blocks until the copies beside the computation are done."""
    if has_gpu():
        _copy_stream().synchronize()


def pinned_empty(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8 on the host, page-locked where there is a GPU."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=has_gpu())


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` in host memory, page-locked where there is a GPU (so that copies back are asynchronous)."""
    if not has_gpu():
        return tensor.detach().clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach())
