"""A folder appears under its name only when whole: it is written beside it as `partial`, then renamed."""

import os
import shutil
from pathlib import Path

from megarlhf.errors import CheckpointError


def partial_of(path: Path) -> Path:
    """Where the folder `path` is while it is written."""
    return path.parent / f".{path.name}.partial"


def require_new(path: Path) -> None:
    """Raise CheckpointError unless nothing, or an empty folder, has this name."""
    if path.exists() and (path.is_file() or any(path.iterdir())):
        raise CheckpointError(f"{path}: is there already; export to a new folder, or remove this one first")


def require_room(path: Path, num_bytes: int) -> None:
    """Raise CheckpointError unless the disk of the partial folder has room for so many bytes."""
    free = shutil.disk_usage(partial_of(path)).free
    if free < num_bytes:
        raise CheckpointError(
            f"{path}: the export needs {num_bytes} bytes, {free} are free; make room or choose another disk"
        )


def start_folder(path: Path, num_bytes: int, replace: bool) -> None:
    """Make the partial folder. Everything that can be known to fail is found before the ranks send anything."""
    partial = partial_of(path)
    if not replace:
        require_new(path)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    require_room(path, num_bytes)


def finish_folder(path: Path) -> None:
    """The partial folder takes its name, in place of a folder that is to be replaced."""
    replaced = path.parent / f".{path.name}.replaced"
    if path.exists():
        path.rename(replaced)
    partial_of(path).rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


def to_disk(path: Path) -> None:
    """A file's contents, or a folder's list of names, down to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
