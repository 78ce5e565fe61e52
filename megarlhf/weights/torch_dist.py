"""The files of a torch.distributed checkpoint (megatron-core's torch_dist), written and read one tensor at a time.

A checkpoint is a table (`.metadata`) and files of blobs (`.distcp`), each blob what `torch.save` makes of one block of
one tensor. torch's own writer keeps every tensor of a file until the file ends, and its reader copies blobs whole;
here a writer holds one block, and a reader maps the files and hands out views.
"""

import io
import math
import mmap
import os
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megarlhf.errors import CheckpointError
from megarlhf.weights.boxes import Box, intersect, move, num_elements, shape_of, slices
from megarlhf.weights.folder import read_ahead
from megarlhf.weights.restricted_pickle import StoredTensor, read_metadata, read_tensor_record

METADATA_NAME = ".metadata"
CHECKPOINT_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""metadata.json, by which megatron-core knows its checkpoints."""
_ALIGN_BYTES = 64


@dataclass(frozen=True)
class Block:
    """One box of a tensor of the checkpoint, and the bytes of a file that hold it. `box` None: an object's bytes."""

    name: str
    box: Box | None
    file: str
    offset: int
    length: int
    dtype: torch.dtype | None


def write_blocks(path: Path, blocks: Iterable[tuple[str, Box, torch.Tensor]]) -> list[Block]:
    """Write one `.distcp` file, down to the disk, holding one block at a time."""
    written = []
    with path.open("wb") as stream:
        for name, box, tensor in blocks:
            stream.write(b"\0" * (aligned(stream.tell()) - stream.tell()))
            offset = stream.tell()
            torch.save(tensor, stream)
            written.append(Block(name, box, path.name, offset, stream.tell() - offset, tensor.dtype))
        stream.flush()
        os.fsync(stream.fileno())
    return written


def object_bytes() -> bytes:
    """What stands for an empty object, as megarlhf's own models' `_extra_state` is."""
    stream = io.BytesIO()
    torch.save([None], stream)
    return stream.getvalue()


def aligned(offset: int) -> int:
    """Where the next blob of a file may begin."""
    return -(-offset // _ALIGN_BYTES) * _ALIGN_BYTES


def write_table(folder: Path, shapes: Mapping[str, tuple[int, ...]], blocks: Iterable[Block]) -> None:
    """Write `.metadata` for blocks that are on the disk; `shapes` are the whole tensors' by name."""
    table: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage = {}
    for block in sorted(blocks, key=lambda block: (block.name, block.box or ())):
        info = _StorageInfo(block.file, block.offset, block.length)
        if block.box is None:
            table[block.name] = BytesStorageMetadata()
            storage[MetadataIndex(block.name)] = info
            continue
        if block.name not in table:
            properties = TensorProperties(dtype=block.dtype)
            table[block.name] = TensorStorageMetadata(properties, torch.Size(shapes[block.name]), [])
        entry = table[block.name]
        assert isinstance(entry, TensorStorageMetadata), f"{block.name} is a tensor and an object"
        offsets, chunks = torch.Size(start for start, _ in block.box), entry.chunks
        storage[MetadataIndex(block.name, offsets, len(chunks))] = info
        chunks.append(ChunkStorageMetadata(offsets, torch.Size(shape_of(block.box))))
    data = pickle.dumps(Metadata(table, None, storage, StorageMeta(), CURRENT_DCP_VERSION))
    with (folder / METADATA_NAME).open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


class TorchDistFolder:
    """Tensors of a torch_dist checkpoint by name. Opening reads the table and checks it against the files' lengths.

    Raises CheckpointError naming file, tensor and next move.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        table = self.path / METADATA_NAME
        if not table.is_file():
            raise CheckpointError(
                f"{self.path}: no {METADATA_NAME} file, so this is no finished torch_dist checkpoint; give the folder "
                "that holds it (an iteration's, such as iter_0000100)"
            )
        self._table = read_metadata(table.read_bytes(), str(table))
        self._blocks = self._read_blocks()
        self._maps: dict[str, mmap.mmap] = {}
        self._views: dict[Block, torch.Tensor] = {}
        self._by_start: dict[str, dict[tuple[int, int], list[Block]]] = {}
        self._require_files()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(self._blocks))

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all files that tensors are read from, and the table, sorted."""
        return tuple(sorted({METADATA_NAME} | {block.file for blocks in self._blocks.values() for block in blocks}))

    @property
    def objects(self) -> tuple[str, ...]:
        """Names of entries that are not tensors, sorted. They are pickles, and never read."""
        return tuple(sorted(set(self._table.state_dict_metadata) - set(self._blocks)))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor."""
        return tuple(self._entry(name).size)

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor."""
        return self._entry(name).properties.dtype

    def _entry(self, name: str) -> TensorStorageMetadata:
        entry = self._table.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata), f"{name} is an object, not a tensor"
        return entry

    def blocks(self, name: str) -> tuple[Block, ...]:
        """The blocks that a tensor is stored as."""
        return self._blocks[name]

    def parts(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """What lies in a box of a tensor, block by block: (where in the tensor, a view of the file)."""
        for block, common in self._meeting(name, box):
            yield common, self._view(block)[slices(move(common, block.box, _at_zero(block.box)))]

    def prefetch(self, name: str, box: Box) -> None:
        """Ask for the blocks that meet a box to be read from the disk; does not wait for them."""
        for block, _ in self._meeting(name, box):
            read_ahead(self.path / block.file, block.offset, block.length)

    def _meeting(self, name: str, box: Box) -> Iterator[tuple[Block, Box]]:
        """The blocks that meet a box of a tensor, with what they have in common."""
        # The first axis is mostly that of layers: of a few thousand blocks, look at one layer's only.
        start, stop = box[0]
        if name not in self._by_start:
            rows: dict[tuple[int, int], list[Block]] = {}
            for block in self._blocks[name]:
                rows.setdefault(block.box[0], []).append(block)
            self._by_start[name] = rows
        for (first, last), blocks in self._by_start[name].items():
            if first < stop and start < last:
                for block in blocks:
                    common = intersect(block.box, box)
                    if common is not None:
                        yield block, common

    def _read_blocks(self) -> dict[str, tuple[Block, ...]]:
        try:
            return {
                name: self._blocks_of(name, entry)
                for name, entry in self._table.state_dict_metadata.items()
                if isinstance(entry, TensorStorageMetadata)
            }
        except (AttributeError, TypeError, KeyError, ValueError) as problem:
            raise CheckpointError(f"{self.path / METADATA_NAME}: not a usable table ({problem!r})") from problem

    def _blocks_of(self, name: str, entry: TensorStorageMetadata) -> tuple[Block, ...]:
        found = []
        for chunk in entry.chunks:
            box = tuple((int(at), int(at) + int(size)) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            info = self._table.storage_data[MetadataIndex(name, chunk.offsets)]
            if info.transform_descriptors:
                raise ValueError(f"{name} is stored transformed by {info.transform_descriptors}")
            found.append(Block(name, box, info.relative_path, info.offset, info.length, entry.properties.dtype))
        if sum(num_elements(block.box) for block in found) != math.prod(entry.size):
            raise ValueError(f"the blocks of {name} do not make up its shape {list(entry.size)}")
        return tuple(found)

    def _require_files(self) -> None:
        """Every block lies inside its file, which lies in the folder."""
        sizes: dict[str, int | None] = {}
        for block in (block for blocks in self._blocks.values() for block in blocks):
            if block.file not in sizes:
                file = self.path / block.file
                is_here = Path(block.file).name == block.file and file.is_file()
                sizes[block.file] = file.stat().st_size if is_here else None
            size = sizes[block.file]
            if size is None or size < block.offset + block.length:
                state = "is not there" if size is None else f"ends at byte {size}, before {block.name} does"
                raise CheckpointError(f"{self.path / block.file}: {state}; copy the checkpoint again")

    def _view(self, block: Block) -> torch.Tensor:
        if block not in self._views:
            self._views[block] = self._checked_view(block)
        return self._views[block]

    def _checked_view(self, block: Block) -> torch.Tensor:
        where = f"{self.path / block.file}: {block.name} at byte {block.offset}"
        try:
            return self._map_tensor(block, where)
        except (zipfile.BadZipFile, KeyError, ValueError, RuntimeError) as problem:
            if isinstance(problem, CheckpointError):
                raise
            raise CheckpointError(f"{where}: damaged ({problem}); copy the checkpoint again") from problem

    def _map_tensor(self, block: Block, where: str) -> torch.Tensor:
        """`torch.save` makes an uncompressed zip archive: its pickle says the shape, another member is the data."""
        mapping = self._mapping(block.file)
        with zipfile.ZipFile(_Window(mapping, block.offset, block.length)) as archive:
            root = archive.namelist()[0].split("/")[0]
            record = read_tensor_record(archive.read(f"{root}/data.pkl"), where)
            member = archive.getinfo(f"{root}/data/{record.storage}")
        if record.dtype != block.dtype or record.size != shape_of(block.box) or record.stride != _dense(record.size):
            raise CheckpointError(f"{where}: holds {record}, the table says {shape_of(block.box)} of {block.dtype}")
        start = _data_start(mapping, block.offset + member.header_offset)
        return _from_buffer(mapping, start, record, member)

    def _mapping(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            with (self.path / file).open("rb") as stream:
                # A private copy that is never written to: torch wants a buffer that could be.
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]


class _Window(io.RawIOBase):
    """Part of a mapped file, as a file: reading copies only what is asked for."""

    def __init__(self, mapping: mmap.mmap, offset: int, length: int):
        self._mapping, self._offset, self._length, self._at = mapping, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, buffer) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        start = self._offset + self._at
        buffer[:count] = self._mapping[start : start + count]
        self._at += count
        return count


def _at_zero(box: Box) -> Box:
    return tuple((0, stop - start) for start, stop in box)


def _dense(size: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor of this size in row-major order."""
    return tuple(math.prod(size[axis + 1 :]) for axis in range(len(size)))


def _data_start(mapping: mmap.mmap, header: int) -> int:
    """A member's bytes follow its local header: 30 bytes, its name, and padding of a length told at byte 28."""
    name, extra = (int.from_bytes(mapping[header + at : header + at + 2], "little") for at in (26, 28))
    return header + 30 + name + extra


def _from_buffer(mapping: mmap.mmap, start: int, record: StoredTensor, member: zipfile.ZipInfo) -> torch.Tensor:
    count = math.prod(record.size)
    held = member.file_size // record.dtype.itemsize - record.offset
    if member.compress_type != zipfile.ZIP_STORED or held < count:
        raise ValueError(f"data of {member.file_size} bytes do not hold {count} {record.dtype}")
    flat = torch.frombuffer(
        mapping, dtype=record.dtype, count=count, offset=start + record.offset * record.dtype.itemsize
    )
    return flat.view(record.size)
