"""The zip archive that `torch.save` makes of one tensor, without the tensor: every byte but the data's, and its size.

So a file of many such archives can be laid out before anything is read, and filled in any order, by any process.
torch's own writer needs the whole tensor in memory, and computes its checksum ten times slower than zlib does.
Formats: PKWARE APPNOTE.TXT 6.3 (4.3.7 local header, 4.3.12 directory, 4.5.3 sizes of 64 bits), torch/serialization.py.
"""

import io
import math
import pickle
import struct
import sys
import zlib
from dataclasses import dataclass

import torch

_ALIGN_BYTES = 64
_ROOT = "archive"
_NARROW = 0xFFFFFFFF
"""Sizes from here on are written in 64 bits, in an extra field."""
_DATE = 0x21
"""The first day that a zip archive can name, so that equal tensors make equal archives."""


@dataclass(frozen=True)
class _Record:
    name: str
    num_bytes: int
    crc: int
    offset: int


class Archive:
    """What `torch.save` makes of a dense tensor of this shape and type; `torch.load` reads it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype):
        self.num_data_bytes = math.prod(shape) * dtype.itemsize
        order = sys.byteorder.encode()
        small = {"data.pkl": _pickled(shape, dtype), "byteorder": order, "version": b"3\n"}
        self._small = {f"{_ROOT}/{name}": content for name, content in small.items()}
        self.data_offset = len(self._head(0)[0])
        self.num_bytes = self.data_offset + self.num_data_bytes + len(self.around(0)[1])

    def around(self, crc: int) -> tuple[bytes, bytes]:
        """The bytes before and after the data, whose CRC-32 is `crc`."""
        head, records = self._head(crc)
        start = len(head) + self.num_data_bytes
        directory = b"".join(_directory_entry(record) for record in records)
        return head, directory + _end(len(records), start, len(directory))

    def _head(self, crc: int) -> tuple[bytes, list[_Record]]:
        head, records = b"", []
        for name, content in self._small.items():
            records.append(_Record(name, len(content), zlib.crc32(content), len(head)))
            head += _local_header(records[-1]) + content
        records.append(_Record(f"{_ROOT}/data/0", self.num_data_bytes, crc, len(head)))
        return head + _local_header(records[-1]), records


def _local_header(record: _Record) -> bytes:
    """With padding (in an extra field that readers skip), so that what follows it is aligned within the archive."""
    name, is_wide = record.name.encode(), record.num_bytes >= _NARROW
    extra = struct.pack("<HHQQ", 1, 16, record.num_bytes, record.num_bytes) if is_wide else b""
    gap = -(record.offset + 30 + len(name) + len(extra) + 4) % _ALIGN_BYTES
    extra += struct.pack("<2sH", b"FB", gap) + b"Z" * gap
    size = _NARROW if is_wide else record.num_bytes
    version = 45 if is_wide else 20
    fixed = (b"PK\3\4", version, 0, 0, 0, _DATE, record.crc, size, size, len(name), len(extra))
    return struct.pack("<4s5H3L2H", *fixed) + name + extra


def _directory_entry(record: _Record) -> bytes:
    name, is_wide = record.name.encode(), record.num_bytes >= _NARROW
    extra = struct.pack("<HHQQ", 1, 16, record.num_bytes, record.num_bytes) if is_wide else b""
    size = _NARROW if is_wide else record.num_bytes
    version = 45 if is_wide else 20
    fixed = (b"PK\1\2", version, version, 0, 0, 0, _DATE, record.crc, size, size, len(name), len(extra))
    return struct.pack("<4s6H3L5H2L", *fixed, 0, 0, 0, 0, record.offset) + name + extra


def _end(count: int, start: int, length: int) -> bytes:
    """The end of the directory; with its 64-bit form and the pointer to that where the data are large."""
    wide = b""
    if start >= _NARROW:
        wide = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, length, start)
        wide += struct.pack("<4sLQL", b"PK\6\7", 0, start + length, 1)
    return wide + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, length, min(start, _NARROW), 0)


def _pickled(shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """`data.pkl`: how torch pickles such a tensor. The one made here is never written to, so it takes no memory."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=2).dump(torch.empty(shape, dtype=dtype))
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> tuple | None:
        if isinstance(obj, torch.storage.TypedStorage):
            return "storage", getattr(torch, obj._pickle_storage_type()), "0", "cpu", obj._size()
        return None
