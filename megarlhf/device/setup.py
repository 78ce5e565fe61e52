"""Getting a process ready: once, before megatron.core is imported, and with one answer to "cuda or cpu?"."""

import os
import socket
import sys

import torch

from megarlhf.device import cpu, megatron
from megarlhf.device.packages import package_violations
from megarlhf.errors import ConfigError
from megarlhf.launcher import local_rank

_prepared: list[bool] = []
"""Holds one item once the process is prepared (a list, so that no function rebinds a module's name)."""


def is_prepared() -> bool:
    """True once `prepare` has run in this process."""
    return bool(_prepared)


def prepare() -> None:
    """Make it safe to import megatron.core in this process, with or without a GPU. Idempotent.

    Imports torch, then transformers (which must see torch as it is), then, when there is no GPU, applies the patches
    of `cpu.py`. Raises RuntimeError when megatron.core was imported first: it would have bound unpatched functions; and
    ConfigError for packages beside which it cannot be imported.
    """
    if is_prepared():
        return
    # Megatron's order of communication and computation under sequence parallelism relies on it; read when CUDA starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    has_no_gpu = not torch.cuda.is_available()
    if has_no_gpu and "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core was imported before megarlhf.device.prepare(); call prepare() first")
    violations = package_violations(has_gpu=not has_no_gpu)
    if violations:
        raise ConfigError(violations)
    import transformers  # noqa: F401  (its import evaluates annotations such as torch.cuda.Stream | None)

    if has_no_gpu:
        cpu.apply()
    else:
        torch.cuda.set_device(_checked_device(local_rank(), torch.cuda.device_count(), socket.gethostname()))
    megatron.quieten()
    _prepared.append(True)


def _checked_device(local: int, count: int, host: str) -> int:
    """`local` when it is one of `count` GPUs. Raises ConfigError."""
    if local >= count:
        raise ConfigError(
            f"environment: LOCAL_RANK {local} on {host}, which has {count} GPUs; start {count} ranks a machine "
            "(--nproc-per-node, --ntasks-per-node), or look at CUDA_VISIBLE_DEVICES"
        )
    return local


def has_gpu() -> bool:
    """True when tensors live on a GPU in this process."""
    return torch.cuda.is_available()


def current() -> torch.device:
    """The torch.device of this process: cuda:LOCAL_RANK, or cpu."""
    return torch.device("cuda", local_rank()) if has_gpu() else torch.device("cpu")


def backend() -> str:
    """The collective backend that serves `current()`: "nccl" or "gloo"."""
    return "nccl" if has_gpu() else "gloo"
