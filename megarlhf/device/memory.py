"""Device memory and pinned host buffers; without a GPU these are no-ops, or count nothing."""

import torch

from megarlhf.device.setup import has_gpu


def synchronize() -> None:
    """Wait until the device has done everything asked of it (so that wall-clock times are true)."""
    if has_gpu():
        torch.cuda.synchronize()


def empty_cache() -> None:
    """Give freed device memory back to the driver, so that other tenants and libraries can have it."""
    if has_gpu():
        torch.cuda.empty_cache()


def memory_allocated_bytes() -> int:
    """Bytes of live tensors on the device; 0 without a GPU, where tensors are ordinary host memory."""
    return torch.cuda.memory_allocated() if has_gpu() else 0


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` in host memory, page-locked where there is a GPU (so that copies back are asynchronous)."""
    if not has_gpu():
        return tensor.detach().clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach())
