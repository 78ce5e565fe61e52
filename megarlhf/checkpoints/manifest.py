"""What a checkpoint consists of, in numbers: the last file that is written, and the first that is believed.

A checkpoint is whole when its manifest can be read and every file that it lists has its size; it is intact when every
file has its checksum too.
"""

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarlhf.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
FORMAT = 1
_CHUNK_BYTES = 2**22


@dataclass(frozen=True)
class FileRecord:
    """A file as it was read back after it was written."""

    name: str
    num_bytes: int
    crc32: int


def record_of(path: Path) -> FileRecord:
    """Size and checksum of a file, read in chunks. Raises OSError."""
    crc, size = 0, 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return FileRecord(path.name, size, crc)


@dataclass(frozen=True)
class Manifest:
    """Step (how many were done), files, and the number that the best checkpoint is chosen by, where there is one."""

    step: int
    files: tuple[FileRecord, ...]
    metric: str = ""
    value: float | None = None

    def to_json(self) -> str:
        """The text of manifest.json."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files have their sizes. Raises CheckpointError saying what is wrong."""
    path = folder / MANIFEST_NAME
    try:
        manifest = _parse(json.loads(path.read_bytes()))
    except OSError as problem:
        raise CheckpointError(f"{path}: cannot be read ({problem.strerror}); not a finished checkpoint") from problem
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise CheckpointError(f"{path}: damaged ({type(problem).__name__}: {problem})") from problem
    for record in manifest.files:
        file = folder / record.name
        size = file.stat().st_size if file.is_file() else None
        if size != record.num_bytes:
            state = "is missing" if size is None else f"has {size} bytes"
            raise CheckpointError(f"{file}: {state}, {MANIFEST_NAME} says {record.num_bytes} bytes")
    return manifest


def _parse(content: Any) -> Manifest:
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']!r}, this version reads {FORMAT}")
    files = tuple(_file(entry) for entry in content["files"])
    step, value = content["step"], content["value"]
    if type(step) is not int or step < 0 or not files:
        raise ValueError(f"step {step!r} with {len(files)} files")
    return Manifest(step, files, str(content["metric"]), None if value is None else float(value))


def _file(entry: dict[str, Any]) -> FileRecord:
    record = FileRecord(entry["name"], entry["num_bytes"], entry["crc32"])
    if type(record.name) is not str or Path(record.name).name != record.name or record.name in ("", ".", ".."):
        raise ValueError(f"file name {record.name!r} leaves the folder")
    if "\0" in record.name or type(record.num_bytes) is not int or type(record.crc32) is not int:
        raise ValueError(f"not a file's record: {entry}")
    return record


def require_intact(folder: Path, records: tuple[FileRecord, ...]) -> None:
    """Raises CheckpointError naming the first file whose checksum is another than its record says."""
    for record in records:
        try:
            found = record_of(folder / record.name)
        except OSError as problem:
            raise CheckpointError(f"{folder / record.name}: cannot be read ({problem.strerror})") from problem
        if found != record:
            raise CheckpointError(
                f"{folder / record.name}: damaged (checksum {found.crc32:08x} of {found.num_bytes} bytes, "
                f"{MANIFEST_NAME} says {record.crc32:08x} of {record.num_bytes})"
            )
