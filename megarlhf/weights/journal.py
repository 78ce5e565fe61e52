"""What of an unfinished folder is done, so that a conversion that was killed goes on where it was.

Beside the partial folder lies a file of JSON lines: first what is being made from what, then a line for every unit on
the disk with its checksum. A later run of the same command reads those units again and does the rest.
"""

import fcntl
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megarlhf.errors import CheckpointError
from megarlhf.weights.units import Unit

_READ_BYTES = 8 * 2**20


def journal_of(target: Path) -> Path:
    """Where the journal of the folder `target` is while it is written."""
    return target.parent / f".{target.name}.journal"


class Journal:
    """The journal of one target, held by this process alone. Raises CheckpointError when another one holds it."""

    def __init__(self, target: Path):
        self._path = journal_of(target)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = self._path.open("a+", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            self._stream.close()
            raise CheckpointError(
                f"{target}: another process is writing it now; wait for it, or choose another folder"
            ) from problem

    def earlier(self) -> tuple[dict[str, Any], dict[tuple[str, int], int]]:
        """What an earlier run was about (nothing if there was none), and {(file, offset): CRC-32} of what it wrote."""
        self._stream.seek(0)
        entries = []
        for line in self._stream:
            try:
                entries.append(json.loads(line))
            except ValueError:
                break  # the line that the end came in
        try:
            about = dict(entries[0]) if entries else {}
            return about, {(entry["file"], entry["offset"]): entry["crc32"] for entry in entries[1:]}
        except (KeyError, TypeError, ValueError):
            return {}, {}  # another program's file

    def begin(self, about: Mapping[str, Any], done: Iterable[tuple[Unit, int]] = ()) -> None:
        """Start anew: what this run is about, and what of an earlier run it keeps."""
        self._stream.seek(0)
        self._stream.truncate()
        self._line(about)
        for unit, crc in done:
            self.add(unit, crc)

    def add(self, unit: Unit, crc: int) -> None:
        """A unit is written."""
        self._line({"file": unit.file, "offset": unit.offset, "crc32": crc})

    def close(self, *, remove: bool) -> None:
        """Let go of the journal; `remove` it when nothing is left to go on with."""
        if remove:
            self._path.unlink(missing_ok=True)
        self._stream.close()

    def _line(self, entry: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(entry) + "\n")
        self._stream.flush()


def is_written(unit: Unit, folder: Path, crc: int) -> bool:
    """Whether a unit's bytes are in the file, by their checksum."""
    try:
        descriptor = os.open(folder / unit.file, os.O_RDONLY)
    except OSError:
        return False
    try:
        at, end, found = unit.data_offset, unit.data_offset + unit.num_data_bytes, 0
        head, tail = unit.archive.around(crc) if unit.archive else (b"", b"")
        if os.pread(descriptor, len(head), unit.offset) != head or os.pread(descriptor, len(tail), end) != tail:
            return False
        while at < end:
            data = os.pread(descriptor, min(_READ_BYTES, end - at), at)
            if not data:
                return False
            found, at = zlib.crc32(data, found), at + len(data)
    finally:
        os.close(descriptor)
    return found == crc
