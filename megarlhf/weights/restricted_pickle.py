"""Pickles that come with a checkpoint, read without running what they say: only listed names can be looked up.

A pickle is a small program that may call anything it can import. Here it can reach the records of
torch.distributed.checkpoint, which hold sizes and offsets, and nothing else.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata, planner
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.serialization import _get_layout

from megarlhf.errors import CheckpointError

Names = Mapping[tuple[str, str], Any]
"""(module, name) as the pickle spells it -> what it gets."""

_DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "bool")
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"


def _metadata_names() -> Names:
    module = metadata.__name__
    records = (
        metadata.Metadata, metadata.MetadataIndex, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata, metadata.TensorProperties, metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING,
    )  # fmt: skip
    plans = (planner.SavePlan, planner.WriteItem, planner.WriteItemType, planner.TensorWriteData)
    names: dict[tuple[str, str], Any] = {(module, record.__name__): record for record in records}
    names |= {(planner.__name__, plan.__name__): plan for plan in plans}
    names |= {(info.__module__, info.__name__): info for info in (_StorageInfo, _StoragePrefix)}
    names |= {("torch", name): getattr(torch, name) for name in (*_DTYPES, *_INTEGERS, "Size")}
    # Records of megatron-core 0.15, which it keeps as empty classes to be able to read its own files.
    names |= {(_MCORE, "MCoreMetadata"): metadata.Metadata, (_MCORE, "MCoreSavePlan"): planner.SavePlan}
    names |= {(place, "PosixPath"): PurePosixPath for place in ("pathlib", "pathlib._local")}
    return names | {("torch.serialization", "_get_layout"): _get_layout, ("collections", "OrderedDict"): OrderedDict}


@dataclass(frozen=True)
class StoredTensor:
    """What a saved tensor's own pickle says: where in its storage file it lies, counted in elements."""

    dtype: torch.dtype
    storage: str
    num_stored: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16, "LongStorage": torch.int64, "IntStorage": torch.int32, "ByteStorage": torch.uint8,
}  # fmt: skip


def _tensor(storage: tuple, offset: int, size: tuple, stride: tuple, *_: Any) -> StoredTensor:
    dtype, name, count = storage
    return StoredTensor(dtype, name, count, offset, tuple(size), tuple(stride))


_METADATA = _metadata_names()
_TENSOR: Names = {
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("collections", "OrderedDict"): OrderedDict,
}


def read_metadata(data: bytes, where: str) -> metadata.Metadata:
    """The record in a `.metadata` file. Raises CheckpointError naming the first name that it has no right to."""
    found = _read(data, _METADATA, where)
    if not isinstance(found, metadata.Metadata):
        raise CheckpointError(f"{where}: holds a {type(found).__name__}, expected a torch distributed checkpoint's")
    return found


def read_tensor_record(data: bytes, where: str) -> StoredTensor:
    """The record in a saved tensor's `data.pkl`. Raises CheckpointError when it holds anything else."""
    found = _read(data, _TENSOR, where)
    if not isinstance(found, StoredTensor):
        raise CheckpointError(f"{where}: holds a {type(found).__name__}, expected one tensor")
    return found


def _read(data: bytes, names: Names, where: str) -> Any:
    try:
        return _Unpickler(io.BytesIO(data), names, where).load()
    except CheckpointError:
        raise
    except Exception as problem:  # a damaged pickle fails in as many ways as it has instructions
        raise CheckpointError(f"{where}: damaged ({type(problem).__name__}: {problem}); copy it again") from problem


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, names: Names, where: str):
        super().__init__(file)
        self._names = names
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._names:
            raise CheckpointError(
                f"{self._where}: asks for {module}.{name}, which no checkpoint needs; nothing of it was run. If you "
                "trust the file, convert it where it was written"
            )
        return self._names[module, name]

    def persistent_load(self, saved: Any) -> tuple[torch.dtype, str, int]:
        """A tensor's storage: ("storage", type, name, device, number of elements)."""
        kind, dtype, name, _, count = saved
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{self._where}: holds {kind!r}, expected a tensor's storage")
        return dtype, str(name), int(count)
