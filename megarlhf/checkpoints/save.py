"""Writing a checkpoint: every rank one file, the first rank the table, the state and the manifest; then the name.

The folder is a megatron-core distributed checkpoint (torch_dist) with two more files. It is written beside its place,
brought to the disk, read back, and renamed; a run that is killed at any moment leaves the earlier ones untouched.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarlhf.checkpoints.manifest import MANIFEST_NAME, FileRecord, Manifest, record_of
from megarlhf.checkpoints.shards import NamedBox
from megarlhf.errors import CheckpointError
from megarlhf.parallel.rows import gather_objects
from megarlhf.weights.agree import raise_together
from megarlhf.weights.partial import partial_of, to_disk
from megarlhf.weights.torch_dist import CHECKPOINT_FORMAT, METADATA_NAME, Block, TorchDistFolder, aligned, write_table

STATE_NAME = "state.json"


@dataclass(frozen=True)
class Content:
    """What one rank gives to a checkpoint."""

    boxes: Sequence[NamedBox]
    """Its boxes of the global tensors, in host memory, and nobody else's to change."""
    shapes: Mapping[str, tuple[int, ...]]
    """Every global tensor's shape: the same on every rank."""
    state: Mapping[str, Any]
    """Plain values: the same on every rank."""


@dataclass(frozen=True)
class _Written:
    blocks: list[Block]
    record: FileRecord


class PendingSave:
    """A checkpoint that is being written. `finish` gives it its name; until then it does not exist."""

    def __init__(
        self, folder: Path, content: Content, step: int, group: dist.ProcessGroup, *, metric: str, value: float | None
    ):
        """Starts writing in a thread. Collective over `group`; raises CheckpointError on all of its ranks."""
        self.folder = folder
        self._content, self._group = content, group
        self._manifest = Manifest(step, (), metric, value)
        problem = None
        if dist.get_rank(group) == 0:
            problem = _attempt(self._start)
        raise_together(problem, group)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[_Written] = self._pool.submit(self._write)

    @property
    def is_written(self) -> bool:
        """This rank's file is on the disk, or failed to get there."""
        return self._writing.done()

    def finish(self) -> None:
        """Waits for all ranks' files, completes the folder and names it. Collective over the group; raises
        CheckpointError on all of its ranks, leaving no checkpoint behind."""
        written: list[_Written] = []
        problem = _attempt(lambda: written.append(self._writing.result()))
        self._pool.shutdown()
        is_first = dist.get_rank(self._group) == 0
        try:
            raise_together(problem, self._group)
            everyone = gather_objects(written[0], self._group)
            raise_together(_attempt(lambda: self._complete(everyone)) if is_first else None, self._group)
        except CheckpointError:
            if is_first:
                shutil.rmtree(partial_of(self.folder), ignore_errors=True)
            raise

    def _start(self) -> None:
        partial = partial_of(self.folder)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def _write(self) -> _Written:
        file = partial_of(self.folder) / f"__{dist.get_rank(self._group)}_0.distcp"
        if not file.parent.is_dir():
            raise CheckpointError(
                f"{file.parent}: made by the first rank, not seen by this one; run.dir must be on a file system that "
                "all machines share"
            )
        return _Written(_write_boxes(file, self._content.boxes), record_of(file))

    def _complete(self, everyone: Sequence[_Written]) -> None:
        partial = partial_of(self.folder)
        write_table(partial, self._content.shapes, [block for written in everyone for block in written.blocks])
        torch.save({}, partial / "common.pt")
        (partial / "metadata.json").write_text(json.dumps(CHECKPOINT_FORMAT), encoding="utf-8")
        (partial / STATE_NAME).write_text(json.dumps(self._content.state, indent=1), encoding="utf-8")
        _require_complete(partial, self._content.shapes)
        others = [partial / name for name in (METADATA_NAME, "common.pt", "metadata.json", STATE_NAME)]
        records = [written.record for written in everyone] + [record_of(file) for file in others]
        manifest = Manifest(self._manifest.step, tuple(records), self._manifest.metric, self._manifest.value)
        (partial / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
        for file in [*others, partial / MANIFEST_NAME, partial]:
            to_disk(file)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        partial.rename(self.folder)
        to_disk(self.folder.parent)


def _write_boxes(path: Path, boxes: Sequence[NamedBox]) -> list[Block]:
    """One `.distcp` file, down to the disk."""
    written = []
    with path.open("wb") as stream:
        for box in boxes:
            stream.write(b"\0" * (aligned(stream.tell()) - stream.tell()))
            offset = stream.tell()
            torch.save(box.values, stream)
            length = stream.tell() - offset
            written.append(Block(box.name, box.box, path.name, offset, length, box.values.dtype))
        stream.flush()
        os.fsync(stream.fileno())
    return written


def _require_complete(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Opening the folder checks that blocks make up their tensors; here, that all tensors are there."""
    missing = sorted(shapes.keys() ^ set(TorchDistFolder(folder).names))
    assert not missing, f"no rank wrote {missing[:4]}: some layout's ranks do not make up the model"


def _attempt(action) -> str | None:
    """What went wrong in `action`, as a sentence."""
    try:
        action()
    except CheckpointError as problem:
        return str(problem)
    except OSError as problem:
        return f"checkpoint: {problem.filename or ''}: {problem.strerror}; earlier checkpoints are untouched"
    return None
