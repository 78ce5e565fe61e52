"""What a run computes with: versions of the packages, and of the code itself."""

import platform
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import megarlhf
from megarlhf.device.setup import has_gpu

_PACKAGES = ("torch", "megatron-core", "transformers", "transformer-engine")


def versions() -> dict[str, str]:
    """Package -> version; `none` for one that is not installed. `code` is a digest of megarlhf's own source files."""
    found = {"megarlhf": megarlhf.__version__, "code": code_digest(), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if has_gpu() else "none"
    return found


def code_digest() -> str:
    """The same for the same source files, wherever they are installed."""
    root, digest = Path(megarlhf.__file__).parent, blake2b(digest_size=8)
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
