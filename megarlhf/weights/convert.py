"""From one way of storing a model to the other, by processes that hold a chunk of a tensor each; no accelerator.

The target appears under its name only when every file is on the disk and has been opened again and checked. Until
then it is a hidden folder beside it, which a later run of the same command goes on with.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarlhf import __version__
from megarlhf.config.layout import Layout
from megarlhf.errors import CheckpointError
from megarlhf.models.architecture import require_layout
from megarlhf.telemetry.progress import ByteProgress
from megarlhf.weights.file_plan import FilePlan, hugging_face_plan, megatron_plan, stored_dtype
from megarlhf.weights.folder import INDEX_NAME, SafetensorsFolder
from megarlhf.weights.hf_config import copy_companions, exported_config, require_tokenizer
from megarlhf.weights.journal import Journal, is_written
from megarlhf.weights.megatron_folder import MegatronFolder
from megarlhf.weights.megatron_keys import key_shapes
from megarlhf.weights.partial import finish_folder, partial_of, require_new, require_room, start_folder, to_disk
from megarlhf.weights.safetensors_file import MAX_SHARD_BYTES
from megarlhf.weights.source import Source, open_source
from megarlhf.weights.torch_dist import CHECKPOINT_FORMAT, write_table
from megarlhf.weights.workers import write_units


@dataclass(frozen=True)
class _Job:
    """A folder to write: the tensors by plan, then by `finish` what goes beside them, which opens it and checks."""

    source: Source
    target: Path
    plan: FilePlan
    options: Mapping[str, Any]
    finish: Callable[[Path], None]

    def about(self) -> dict[str, Any]:
        """What makes two runs the same."""
        return {"source": self.source.stamp(), "options": dict(self.options), "plan": self.plan.digest()}


def write_megatron(
    source_path: str | Path,
    target: str | Path,
    layout: Layout,
    *,
    config: str | Path | None = None,
    workers: int = 1,
    dtype: torch.dtype | None = None,
    without_tokenizer: bool = False,
    progress: ByteProgress | None = None,
) -> None:
    """Write a model as a torch_dist checkpoint, in blocks and files as ranks of `layout` would have saved them.

    Any layout can load it. Weights keep their dtype unless `dtype` is given (a value head keeps it anyway). A source
    that is itself a checkpoint is laid out anew; one without a tokenizer is refused, unless `without_tokenizer`. What
    an earlier run of the same left unfinished is gone on with. A `target` that is a link is written where it points.
    Raises CheckpointError or LayoutError before anything is written, and CheckpointError, ConversionError or OSError,
    leaving no target behind, when it cannot be finished.
    """
    source, target = _opened(source_path, config, without_tokenizer), Path(target).resolve()
    require_layout(source.architecture, layout, "--tp/--pp/--vp")
    plan, blocks = megatron_plan(source, layout, dtype)

    def finish(partial: Path) -> None:
        write_table(partial, key_shapes(source.architecture, layout, source.head), blocks)
        torch.save({}, partial / "common.pt")
        _write_companions(source, partial, dtype)
        MegatronFolder(partial)
        _write_json(partial / "metadata.json", CHECKPOINT_FORMAT)

    options = {"format": "torch_dist", "layout": str(layout), "dtype": str(dtype), "version": __version__}
    _write(_Job(source, target, plan, options, finish), workers, progress or ByteProgress())


def write_hugging_face(
    source_path: str | Path,
    target: str | Path,
    *,
    config: str | Path | None = None,
    workers: int = 1,
    dtype: torch.dtype | None = None,
    without_tokenizer: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: ByteProgress | None = None,
) -> None:
    """Write a model as a Hugging Face folder: safetensors and their index, config.json, tokenizer byte for byte.

    Arguments and errors as for `write_megatron`.
    """
    source, target = _opened(source_path, config, without_tokenizer), Path(target).resolve()
    plan = hugging_face_plan(source, dtype, max_shard_bytes)

    def finish(partial: Path) -> None:
        if len(plan.sizes) > 1:
            _write_json(partial / INDEX_NAME, _index(plan))
        _write_companions(source, partial, dtype)
        _check(source, SafetensorsFolder(partial), dtype)

    options = {"format": "safetensors", "max_shard_bytes": max_shard_bytes, "dtype": str(dtype)}
    job = _Job(source, target, plan, options | {"version": __version__}, finish)
    _write(job, workers, progress or ByteProgress())


def _opened(path: str | Path, config: str | Path | None, without_tokenizer: bool) -> Source:
    source = open_source(path, config)
    if not without_tokenizer:
        require_tokenizer(source.config_folder)
    return source


def _write(job: _Job, workers: int, progress: ByteProgress) -> None:
    """Write the folder. Only an interrupt, or a kill, leaves its unfinished form: every other failure removes it."""
    require_new(job.target)
    journal = Journal(job.target)
    try:
        _write_all(job, journal, workers, progress)
        journal.close(remove=True)
    except KeyboardInterrupt:
        journal.close(remove=False)
        raise
    except BaseException:
        shutil.rmtree(partial_of(job.target), ignore_errors=True)
        journal.close(remove=True)
        raise


def _write_all(job: _Job, journal: Journal, workers: int, progress: ByteProgress) -> None:
    partial, plan = partial_of(job.target), job.plan
    done = _kept(job, journal, progress)
    left = [unit for unit in plan.units if (unit.file, unit.offset) not in done]
    if not done:
        start_folder(job.target, plan.num_bytes, replace=False)
        _lay_out(plan, partial)
    require_room(job.target, sum(unit.num_bytes for unit in left))
    kept = [(unit, done[unit.file, unit.offset]) for unit in plan.units if (unit.file, unit.offset) in done]
    journal.begin(job.about(), kept)
    progress.start(job.target.name, plan.num_bytes, sum(unit.num_bytes for unit, _ in kept))
    try:

        def note(unit, crc: int) -> None:
            journal.add(unit, crc)
            progress.advance(unit.num_bytes)

        write_units(left, job.source.tensors, partial, workers, note)
    finally:
        progress.stop()
    job.finish(partial)
    for file in partial.iterdir():
        to_disk(file)
    finish_folder(job.target)
    to_disk(job.target.parent)


def _kept(job: _Job, journal: Journal, progress: ByteProgress) -> dict[tuple[str, int], int]:
    """What an earlier run of the same job left on the disk, read again: {(file, offset): CRC-32}."""
    about, written = journal.earlier()
    if not about or not written or not partial_of(job.target).is_dir():
        return {}
    now = job.about()
    changed = [name for name in now if now[name] != about.get(name)]
    if changed:
        what = "other options" if "options" in changed else "a source that has changed since"
        progress.say(f"{job.target}: an earlier run, with {what}, was not finished; starting afresh")
        return {}
    units = [unit for unit in job.plan.units if (unit.file, unit.offset) in written]
    num_bytes = sum(unit.num_bytes for unit in units)
    progress.say(f"{job.target}: going on with what an earlier run left: {num_bytes} of {job.plan.num_bytes} bytes")
    progress.start("reading again", num_bytes)
    sound = {}
    for unit in units:
        crc = written[unit.file, unit.offset]
        if is_written(unit, partial_of(job.target), crc):
            sound[unit.file, unit.offset] = crc
        progress.advance(unit.num_bytes)
    progress.stop()
    return sound


def _lay_out(plan: FilePlan, folder: Path) -> None:
    """Make the files, in their final sizes, with what is known of them; the rest is holes."""
    for file, size in plan.sizes.items():
        with (folder / file).open("wb") as stream:
            stream.truncate(size)
    for file, offset, data in plan.known:
        with (folder / file).open("r+b") as stream:
            stream.seek(offset)
            stream.write(data)


def _index(plan: FilePlan) -> dict[str, Any]:
    where = {unit.content.pieces[0].hf_name: unit.file for unit in plan.units}
    total = sum(unit.num_bytes for unit in plan.units)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}


def _write_companions(source: Source, folder: Path, dtype: torch.dtype | None) -> None:
    main = stored_dtype(source, next(iter(source.shapes)), dtype)
    name = str(main).removeprefix("torch.")
    config = exported_config(source.config_folder, source.architecture, source.head, name, source.score_entries())
    _write_json(folder / "config.json", config)
    copy_companions(source.config_folder, folder)


def _check(source: Source, folder: SafetensorsFolder, dtype: torch.dtype | None) -> None:
    """What was written has exactly the tensors, shapes and types that it should."""
    found = {name: (folder.shape(name), folder.dtype(name)) for name in folder.names}
    expected = {name: (shape, stored_dtype(source, name, dtype)) for name, shape in source.shapes.items()}
    differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if differing:
        raise CheckpointError(f"{folder.path}: read back differently than written: {', '.join(differing[:4])}")


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
