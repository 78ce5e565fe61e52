"""Writing a safetensors file tensor by tensor: its header needs shapes and types only, so one tensor is in memory."""

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from megarlhf.errors import CheckpointError
from megarlhf.weights.folder import SINGLE_NAME

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
MAX_SHARD_BYTES = 5 * 2**30
_ALIGN_BYTES = 8


def write_safetensors(
    path: Path, tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]], read: Callable[[str], torch.Tensor]
) -> None:
    """Write tensors (name, shape, dtype) in order, down to the disk; `read` gives each when its turn comes."""
    wanted = list(tensors)
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, dtype in wanted:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _spelled(name, dtype), "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, shape, dtype in wanted:
            tensor = read(name).to(dtype).contiguous()
            assert tuple(tensor.shape) == shape, f"{name}: read {tuple(tensor.shape)}, the header says {shape}"
            stream.write(memoryview(tensor.view(-1).view(torch.uint8).numpy()))
            del tensor  # or it would live on while the next one is read
        stream.flush()
        os.fsync(stream.fileno())


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
