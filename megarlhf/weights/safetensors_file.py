"""The layout of safetensors files: which tensors share one, and the header, which needs shapes and types only."""

import json
import math
from collections.abc import Iterable

import torch

from megarlhf.errors import CheckpointError
from megarlhf.weights.folder import SINGLE_NAME

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
MAX_SHARD_BYTES = 5 * 2**30
_ALIGN_BYTES = 8


def header_of(tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> bytes:
    """The beginning of a file that holds tensors (name, shape, dtype) one after the other, up to the first one's bytes.

    Raises CheckpointError for a dtype that weights cannot have.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, dtype in tensors:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _spelled(name, dtype), "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def _spelled(name: str, dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise CheckpointError(f"{name} has dtype {dtype}; accepted: {', '.join(map(str, _NAMES))}; give --dtype")
    return _NAMES[dtype]


def shards(sizes: dict[str, int], max_shard_bytes: int) -> dict[str, list[str]]:
    """file name -> tensors in it, filled in order; a tensor larger than the limit has a file of its own."""
    parts: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if parts[-1] and used + size > max_shard_bytes:
            parts.append([])
            used = 0
        parts[-1].append(name)
        used += size
    if len(parts) == 1:
        return {SINGLE_NAME: parts[0]}
    return {f"model-{place + 1:05d}-of-{len(parts):05d}.safetensors": names for place, names in enumerate(parts)}
