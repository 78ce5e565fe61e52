"""What a run computes with: versions of the packages, and of the code itself."""

import platform
from hashlib import blake2b
from pathlib import Path

import torch

import megarlhf
from megarlhf.device.packages import installed
from megarlhf.device.setup import has_gpu

_PACKAGES = ("torch", "megatron-core", "transformers", "safetensors", "transformer-engine", "transformer-engine-torch")


def versions() -> dict[str, str]:
    """Package -> version; `none` for one that is not installed. `code` is a digest of megarlhf's own source files."""
    found = {"megarlhf": megarlhf.__version__, "code": code_digest(), "python": platform.python_version()}
    found |= {package: installed(package) or "none" for package in _PACKAGES}
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if has_gpu() else "none"
    return found


def code_digest() -> str:
    """The same for the same source files, wherever they are installed."""
    root, digest = Path(megarlhf.__file__).parent, blake2b(digest_size=8)
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
