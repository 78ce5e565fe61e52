"""A folder of safetensors files, read by slices. Index and shards must agree exactly; pickled weights are refused.

Opening reads headers only. A slice is copied out of the file mapping, so only what was asked for stays in memory.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megarlhf.data.files import GIT_LFS
from megarlhf.errors import CheckpointError
from megarlhf.weights.block_scales import BLOCK, FP8, SCALE_SUFFIX, read_scaled, scale_shape
from megarlhf.weights.boxes import Box, slices

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class SafetensorsFolder:
    """Tensors of a Hugging Face model folder by name. Raises CheckpointError naming file, tensor and next move."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such folder; give the folder of a Hugging Face model")
        index = self.path / INDEX_NAME
        single = self.path / SINGLE_NAME
        listed = None if single.is_file() or not index.is_file() else _read_index(index)
        if listed is None and not single.is_file():
            raise CheckpointError(_nothing_to_read(self.path))
        names = sorted(set(listed.values())) if listed else [SINGLE_NAME]
        _require_files(self.path, names, listed)
        self._files = {name: _open(self.path / name) for name in names}
        self._file_of = {tensor: name for name, file in self._files.items() for tensor in file.keys()}  # noqa: SIM118
        self._stored_as: dict[str, str] = {}
        self._scales = self._paired_scales()
        self._starts: dict[str, dict[str, int]] = {}
        if listed is not None:
            _require_agreement(index, listed, {name: set(file.keys()) for name, file in self._files.items()})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(set(self._file_of) - set(self._scales.values())))

    def renamed(self, names: Mapping[str, str]) -> "SafetensorsFolder":
        """The same folder with some tensors under other names: {new name: name in the files}."""
        other = SafetensorsFolder.__new__(SafetensorsFolder)  # `copy` would open the files anew
        other.__dict__ |= self.__dict__
        other._stored_as = {new: stored for new, stored in names.items() if new != stored}
        back = {stored: new for new, stored in other._stored_as.items()}
        other._file_of = {back.get(name, name): file for name, file in self._file_of.items()}
        return other

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all files that tensors are read from, sorted."""
        return tuple(sorted(self._files))

    def file_of(self, name: str) -> str:
        """Name of the file that holds a tensor."""
        return self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the file's header."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor, from the file's header. Raises CheckpointError for one that weights cannot have."""
        found = self._slice(name).get_dtype()
        if name in self._scales:
            return torch.bfloat16
        if found not in _DTYPES:
            raise CheckpointError(
                f"{self.path / self.file_of(name)}: {name} has dtype {found}; accepted: {', '.join(_DTYPES)}; "
                "save the model in bfloat16 or float32"
            )
        return _DTYPES[found]

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A view of one box of a tensor, on the host, in the file's dtype. Copy what you keep: it pins the mapping.

        An FP8 weight is read with its scales, as bfloat16, and is no view.
        """
        if name in self._scales:
            return read_scaled(self._slice(name), self._slice(self._scales[name]), box)
        return self._slice(name)[slices(box)]

    def prefetch(self, name: str, box: Box) -> None:
        """Ask for the rows of a box to be read from the disk; does not wait for them."""
        file = self.file_of(name)
        if file not in self._starts:
            self._starts[file] = _starts(self.path / file)
        shape, (first, last) = self.shape(name), box[0]
        row_bytes = math.prod(shape[1:]) * (1 if name in self._scales else self.dtype(name).itemsize)
        start = self._starts[file][self._stored_as.get(name, name)]
        read_ahead(self.path / file, start + first * row_bytes, (last - first) * row_bytes)

    def _paired_scales(self) -> dict[str, str]:
        """Name of an FP8 weight -> name of its scales. Raises CheckpointError for weights whose scales do not fit."""
        quantised = [name for name in self._file_of if self._slice(name).get_dtype() == FP8]
        problems = []
        for name in quantised:
            scale, expected = name + SCALE_SUFFIX, scale_shape(self.shape(name))
            if scale not in self._file_of:
                problems.append(
                    f"{self.path / self.file_of(name)}: {name} is FP8 but {scale} {list(expected)} is missing"
                )
            elif len(expected) != 2 or self.shape(scale) != expected or self._slice(scale).get_dtype() not in _DTYPES:
                found = f"{list(self.shape(scale))} {self._slice(scale).get_dtype()}"
                problems.append(
                    f"{self.path / self.file_of(scale)}: {scale} is {found}; expected {list(expected)} of "
                    f"{', '.join(_DTYPES)}, a scale for each {BLOCK} x {BLOCK} block of a matrix"
                )
        if problems:
            raise CheckpointError("\n".join([*problems[:20], "download the folder again"]))
        return {name: name + SCALE_SUFFIX for name in quantised}

    def __reduce__(self):
        return _reopened, (self.path, self._stored_as)

    def _slice(self, name: str):
        return self._files[self._file_of[name]].get_slice(self._stored_as.get(name, name))


def _reopened(path: Path, names: dict[str, str]) -> SafetensorsFolder:
    """A folder in another process than the one that opened it."""
    return SafetensorsFolder(path).renamed(names)


def _read_index(path: Path) -> dict[str, str]:
    """tensor name -> file name."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as problem:
        raise CheckpointError(f"{path}: not an index of safetensors ({problem!r}); download it again") from problem
    is_map = isinstance(listed, dict) and all(isinstance(file, str) for file in listed.values())
    if not listed or not is_map:
        raise CheckpointError(f"{path}: weight_map lists no files; download the folder again")
    outside = sorted({file for file in listed.values() if Path(file).is_absolute() or ".." in Path(file).parts})
    if outside:
        raise CheckpointError(f"{path}: lists {_some(outside)}, outside of the folder; download the folder again")
    return listed


def _nothing_to_read(path: Path) -> str:
    pickled = sorted(file.name for pattern in _PICKLED for file in path.glob(pattern))
    others = sorted(file.name for file in path.glob("*.safetensors"))
    if others:
        return (
            f"{path}: has {_some(others)} but neither {SINGLE_NAME} nor {INDEX_NAME}; download the missing index, "
            f"or rename a single file to {SINGLE_NAME}"
        )
    if pickled:
        return (
            f"{path}: has only pickled weights ({_some(pickled)}), which can run code when read; convert them where "
            "you trust them: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW) writes safetensors"
        )
    return f"{path}: no {SINGLE_NAME} and no {INDEX_NAME}; give the folder of a Hugging Face model with its weights"


def _require_files(path: Path, names: list[str], listed: dict[str, str] | None) -> None:
    missing = [name for name in names if not (path / name).is_file()]
    if missing and listed:
        lost = sorted(tensor for tensor, name in listed.items() if name in missing)
        raise CheckpointError(
            f"{path}: {INDEX_NAME} lists {_some(missing)}, which {_is(missing)} not there ({len(lost)} tensors, for "
            f"example {lost[0]}); download the folder again"
        )


def _open(path: Path):
    try:
        with path.open("rb") as stream:
            is_pointer = stream.read(len(GIT_LFS)) == GIT_LFS
        if is_pointer:
            raise CheckpointError(f"{path}: a git-lfs pointer in place of the weights; run git lfs pull in its folder")
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as problem:
        raise CheckpointError(f"{path}: not a readable safetensors file ({problem}); download it again") from problem


def _starts(path: Path) -> dict[str, int]:
    """Where in a safetensors file each tensor begins: after 8 bytes, the header whose length they say, and others."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    return {name: 8 + length + at["data_offsets"][0] for name, at in header.items() if name != "__metadata__"}


def read_ahead(path: Path, offset: int, length: int) -> None:
    """Ask the kernel to read a part of a file from the disk; does not wait for it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)


def _require_agreement(index: Path, listed: dict[str, str], held: dict[str, set[str]]) -> None:
    """Every listed tensor lies in the file it is listed for, and files hold no other."""
    problems = []
    for file, tensors in held.items():
        expected = {tensor for tensor, name in listed.items() if name == file}
        absent, extra = sorted(expected - tensors), sorted(tensors - expected)
        if absent:
            problems.append(f"{index}: lists {_some(absent)} in {file}, which lacks {_it(absent)}")
        if extra:
            problems.append(f"{index.parent / file}: holds {_some(extra)}, not listed for it in {INDEX_NAME}")
    if problems:
        raise CheckpointError("\n".join([*problems, "index and files are of two versions; download them again"]))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _it(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"
