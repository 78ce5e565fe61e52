"""Where every byte of a file to be written comes from: a file is planned whole, then filled piece by piece.

A unit is one tensor of a target file with its place there. Nothing but the source is needed to write it, and no two
units share a byte, so any process may write any unit at any time, and a unit once written need not be written again.
"""

import os
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megarlhf.errors import CheckpointError
from megarlhf.weights.archive import Archive
from megarlhf.weights.boxes import Box, LocalTensor, Piece, intersect, move, num_elements, slices, whole

CHUNK_BYTES = 32 * 2**20
"""What a worker reads or assembles at a time, at most (or one row, where that is more)."""
_WRITE_BYTES = 2**18
"""What is written at a time: the checksum finds it in the processor's cache, and the kernel needs no large pages for it
(from 1 MiB on, finding those takes longer than the copy)."""


class Tensors(Protocol):
    """What can be read by Hugging Face name: a `SafetensorsFolder` or a `MegatronFolder`."""

    def read(self, name: str, box: Box) -> torch.Tensor:
        """One box of a tensor, on the host; a view of the file where that is possible."""
        ...

    def prefetch(self, name: str, box: Box) -> None:
        """Ask for the bytes of a box to be read from the disk; does not wait for them."""
        ...


@dataclass(frozen=True)
class Unit:
    """One tensor to write: `content` says from which pieces; `offset` is its first byte in `file`."""

    file: str
    offset: int
    content: LocalTensor
    dtype: torch.dtype
    archive: Archive | None = None
    """The bytes that lie around the data in a torch_dist file; none in safetensors."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the file, with what lies around the data."""
        return self.archive.num_bytes if self.archive else self.num_data_bytes

    @property
    def num_data_bytes(self) -> int:
        """Bytes of the tensor."""
        return num_elements(whole(self.content.shape)) * self.dtype.itemsize

    @property
    def data_offset(self) -> int:
        """Where in the file the tensor's own bytes begin."""
        return self.offset + (self.archive.data_offset if self.archive else 0)


def window(tensor: LocalTensor, box: Box) -> LocalTensor:
    """A box of a local tensor as a tensor of its own."""
    shape = tuple(stop - start for start, stop in box)
    found = []
    for piece in tensor.pieces:
        common = intersect(piece.target, box)
        if common is not None:
            source = move(common, piece.target, piece.source)
            found.append(Piece(piece.hf_name, source, move(common, box, whole(shape))))
    return LocalTensor(shape, tuple(found))


def prefetch(unit: Unit, tensors: Tensors) -> None:
    """Ask for everything that a unit will read; does not wait for it."""
    rows: dict[str, Box] = {}
    for piece in unit.content.pieces:
        (start, stop), *rest = rows.get(piece.hf_name, piece.source)
        (first, last), *_ = piece.source
        rows[piece.hf_name] = ((min(start, first), max(stop, last)), *rest)
    for name, box in rows.items():
        tensors.prefetch(name, box)


def write_unit(unit: Unit, tensors: Tensors, folder: Path) -> int:
    """Read a unit's pieces and write them where they belong; returns the CRC-32 of the tensor's bytes."""
    descriptor = os.open(folder / unit.file, os.O_WRONLY)
    try:
        at, crc = unit.data_offset, 0
        for part in _parts(unit, tensors):
            data = memoryview(part.view(-1).view(torch.uint8).numpy().data)
            for first in range(0, len(data), _WRITE_BYTES):
                step = data[first : first + _WRITE_BYTES]
                crc = zlib.crc32(step, crc)
                at = _write(descriptor, step, at)
        assert at == unit.data_offset + unit.num_data_bytes, f"{unit.file}: {at} is not where the tensor ends"
        if unit.archive:
            head, tail = unit.archive.around(crc)
            _write(descriptor, memoryview(head), unit.offset)
            _write(descriptor, memoryview(tail), at)
    except OSError as problem:  # writing by descriptor does not say where
        raise OSError(problem.errno, problem.strerror, str(folder / unit.file)) from problem
    finally:
        os.close(descriptor)
    return crc


def _write(descriptor: int, data: memoryview, at: int) -> int:
    """Write everything; returns where it ends."""
    while data:
        count = os.pwrite(descriptor, data, at)
        data, at = data[count:], at + count
    return at


def _parts(unit: Unit, tensors: Tensors) -> Iterator[torch.Tensor]:
    """The tensor's rows in order, in contiguous tensors of the unit's dtype, a chunk of bytes each."""
    content = unit.content
    row_bytes = num_elements(whole(content.shape[1:])) * unit.dtype.itemsize
    rows = max(1, CHUNK_BYTES // row_bytes)
    for start, stop, pieces in _bands(content):
        band = LocalTensor(content.shape, pieces)
        for first in range(start, stop, rows):
            box = ((first, min(first + rows, stop)), *whole(content.shape[1:]))
            yield _assembled(window(band, box), unit.dtype, tensors)


def _bands(content: LocalTensor) -> list[tuple[int, int, tuple[Piece, ...]]]:
    """(first row, end, pieces there), cut where a piece begins or ends, so that one as wide as the tensor is alone."""
    edges = sorted({0, content.shape[0]} | {edge for piece in content.pieces for edge in piece.target[0]})
    found: list[list[Piece]] = [[] for _ in edges[1:]]
    for piece in content.pieces:
        start, stop = piece.target[0]
        for place in range(bisect_left(edges, start), bisect_left(edges, stop)):
            found[place].append(piece)
    return [(row, end, tuple(pieces)) for row, end, pieces in zip(edges, edges[1:], found, strict=False)]


def _assembled(content: LocalTensor, dtype: torch.dtype, tensors: Tensors) -> torch.Tensor:
    """A tensor from its pieces; what no piece covers is padding, zero. A single piece is not copied."""
    if len(content.pieces) == 1 and content.pieces[0].target == whole(content.shape):
        piece = content.pieces[0]
        return _cast(piece.hf_name, tensors.read(piece.hf_name, piece.source), dtype).contiguous()
    result = torch.zeros(content.shape, dtype=dtype)
    for piece in content.pieces:
        result[slices(piece.target)] = _cast(piece.hf_name, tensors.read(piece.hf_name, piece.source), dtype)
    return result


def _cast(name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values in another dtype. Raises CheckpointError where a number would become infinite."""
    cast = values.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(values.dtype).max:
        lost = cast.isinf() & values.isfinite()
        if lost.any():
            largest = float(values[lost].abs().max())
            raise CheckpointError(
                f"{name}: holds {largest:.3g}, too large for {dtype}; give --dtype bf16 or fp32, or none"
            )
    return cast
