"""What is in a model on disk, and how two of them differ; tensor by tensor, in pieces of bounded size."""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megarlhf.errors import CheckpointError
from megarlhf.weights.boxes import num_elements, split, whole
from megarlhf.weights.folder import SafetensorsFolder
from megarlhf.weights.source import Source, open_source
from megarlhf.weights.torch_dist import METADATA_NAME, TorchDistFolder

_PIECE_ELEMENTS = 2**24


@dataclass(frozen=True)
class Difference:
    """One tensor that differs: in its presence, shape, dtype or values."""

    name: str
    kind: str
    first: str
    second: str


@dataclass(frozen=True)
class StoredRow:
    """One tensor under the name that it is stored by."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_blocks: int


@dataclass(frozen=True)
class Report:
    """What a folder holds. `problem` says why it is not the model of its config.json; None when it is."""

    folder: str
    format: str
    tensors: tuple[StoredRow, ...]
    num_bytes: int
    num_files: int
    num_objects: int
    family: str | None
    problem: str | None
    fingerprint: str | None

    def as_dict(self) -> dict:
        """Everything, for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Everything, for a person."""
        rows = [f"{row.name:60} {row.dtype:9} {list(row.shape)} in {row.num_blocks}" for row in self.tensors]
        total = (
            f"{len(self.tensors)} tensors, {self.num_bytes} bytes, {self.num_files} files, {self.num_objects} objects"
        )
        rows += [f"{self.folder}: {self.format}, {total}"]
        rows += [f"model: {self.family}, whole" if self.problem is None else f"not whole: {self.problem}"]
        return rows if self.fingerprint is None else [*rows, f"fingerprint {self.fingerprint}"]


def inspect_folder(path: str | Path, config: str | Path | None = None, *, with_fingerprint: bool = False) -> Report:
    """Report on a folder in either format, by headers only unless a fingerprint is asked for."""
    is_megatron = (Path(path) / METADATA_NAME).is_file()
    stored = TorchDistFolder(path) if is_megatron else SafetensorsFolder(path)
    rows = tuple(_row(stored, name) for name in stored.names)
    try:
        source, problem = open_source(path, config), None
    except CheckpointError as error:
        source, problem = None, str(error)
    return Report(
        folder=str(path),
        format="torch_dist" if is_megatron else "safetensors",
        tensors=rows,
        num_bytes=sum(num_elements(whole(row.shape)) * stored.dtype(row.name).itemsize for row in rows),
        num_files=len({file for name in stored.names for file in _files(stored, name)}),
        num_objects=len(stored.objects) if isinstance(stored, TorchDistFolder) else 0,
        family=source.architecture.family if source else None,
        problem=problem,
        fingerprint=fingerprint(source) if source and with_fingerprint else None,
    )


def fingerprint(source: Source) -> str:
    """SHA-256 over every tensor's Hugging Face name, dtype, shape and bytes: the same for every way of storing them."""
    digest = hashlib.sha256()
    for name, shape in source.shapes.items():
        digest.update(f"{name} {source.tensors.dtype(name)} {shape}\n".encode())
        for box in _boxes(shape):
            digest.update(_bits(source.tensors.read(name, box)).numpy().data)
    return digest.hexdigest()


def compare(first: Source, second: Source) -> list[Difference]:
    """Every difference between two models, by tensor name. Values are compared as bits, so that NaN equals itself."""
    found = []
    for name in dict.fromkeys([*first.shapes, *second.shapes]):
        sides = [_header(source, name) for source in (first, second)]
        kinds = [kind for kind, one, other in zip(("presence", "shape", "dtype"), *sides, strict=True) if one != other]
        if kinds:
            place = ("presence", "shape", "dtype").index(kinds[0])
            found.append(Difference(name, kinds[0], *(str(side[place]) for side in sides)))
        else:
            found += _differing_values(first, second, name)
    return found


def _header(source: Source, name: str) -> tuple[str, list[int] | None, torch.dtype | None]:
    if name not in source.shapes:
        return "absent", None, None
    return "present", list(source.shapes[name]), source.tensors.dtype(name)


def _differing_values(first: Source, second: Source, name: str) -> list[Difference]:
    count, largest = 0, 0.0
    for box in _boxes(first.shapes[name]):
        one, other = first.tensors.read(name, box), second.tensors.read(name, box)
        differ = _elements(one) != _elements(other)
        if differ.any():
            count += int(differ.sum())
            largest = max(largest, float((one.double() - other.double()).abs().max()))
    total = num_elements(whole(first.shapes[name]))
    return [Difference(name, "values", f"{count} of {total} differ", f"by up to {largest:.3g}")] if count else []


def _boxes(shape: tuple[int, ...]):
    return split(whole(shape), _PIECE_ELEMENTS)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def _row(stored: SafetensorsFolder | TorchDistFolder, name: str) -> StoredRow:
    num_blocks = len(stored.blocks(name)) if isinstance(stored, TorchDistFolder) else 1
    return StoredRow(name, str(stored.dtype(name)).removeprefix("torch."), stored.shape(name), num_blocks)


def _files(stored: SafetensorsFolder | TorchDistFolder, name: str) -> set[str]:
    if isinstance(stored, TorchDistFolder):
        return {block.file for block in stored.blocks(name)}
    return {stored.file_of(name)}
