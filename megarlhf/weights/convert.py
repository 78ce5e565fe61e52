"""From one way of storing a model to the other, by threads that hold one tensor each; no accelerator, no launcher.

The target appears under its name only when every file is on the disk and has been opened again and checked.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megarlhf.config.layout import Layout
from megarlhf.errors import CheckpointError, LayoutError
from megarlhf.models.architecture import Architecture, require_layout
from megarlhf.models.head_styles import is_value_head
from megarlhf.weights.boxes import Box, num_elements, slices, whole
from megarlhf.weights.folder import INDEX_NAME, SafetensorsFolder
from megarlhf.weights.hf_config import copy_companions, exported_config
from megarlhf.weights.megatron_folder import MegatronFolder
from megarlhf.weights.megatron_keys import Share, key_shapes, rank_objects, rank_shares
from megarlhf.weights.partial import finish_folder, partial_of, start_folder
from megarlhf.weights.safetensors_file import MAX_SHARD_BYTES, shards, write_safetensors
from megarlhf.weights.source import Source, open_source
from megarlhf.weights.torch_dist import Block, write_blocks, write_table

_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON_FORMAT = {"common_backend": "torch", "common_backend_version": 1}


@dataclass(frozen=True)
class _Job:
    """One file to write: of which source, where, in which dtype (None: as it is)."""

    source: Source
    file: Path
    dtype: torch.dtype | None


@dataclass(frozen=True)
class _BlocksJob(_Job):
    """Every `num_parts`-th weight, from `part` on, of the rank at (tp, pp)."""

    layout: Layout
    tp: int
    pp: int
    part: int
    num_parts: int


@dataclass(frozen=True)
class _ShardJob(_Job):
    names: tuple[str, ...]


def write_megatron(
    source_path: str | Path,
    target: str | Path,
    layout: Layout,
    *,
    config: str | Path | None = None,
    workers: int = 1,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model as a torch_dist checkpoint, in blocks and files as ranks of `layout` would have saved them.

    Any layout can load it. Weights keep their dtype unless `dtype` is given (a value head keeps it anyway). A source
    that is itself a checkpoint is laid out anew. Raises CheckpointError or LayoutError before anything is written, and
    CheckpointError or OSError, leaving no target behind, when it cannot be finished.
    """
    source, target = open_source(source_path, config), Path(target)
    _require_layout(source.architecture, layout)
    num_parts = -(-workers // (layout.tp * layout.pp))
    jobs = [
        _BlocksJob(
            source, partial_of(target) / f"__{pp * layout.tp + tp}_{part}.distcp", dtype,
            layout, tp, pp, part, num_parts,
        )
        for pp in range(layout.pp) for tp in range(layout.tp) for part in range(num_parts)
    ]  # fmt: skip
    with _new_folder(target, source.num_bytes) as partial:
        blocks = [block for written in _run(_write_blocks, jobs, workers) for block in written]
        write_table(partial, key_shapes(source.architecture, layout, source.head), blocks)
        torch.save({}, partial / "common.pt")
        _write_companions(source, partial, dtype)
        MegatronFolder(partial)
        _write_json(partial / "metadata.json", _FORMAT | _COMMON_FORMAT)


def write_hugging_face(
    source_path: str | Path,
    target: str | Path,
    *,
    config: str | Path | None = None,
    workers: int = 1,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model as a Hugging Face folder: safetensors and their index, config.json, tokenizer byte for byte.

    Arguments and errors as for `write_megatron`.
    """
    source, target = open_source(source_path, config), Path(target)
    sizes = {
        name: num_elements(whole(shape)) * _dtype(source, name, dtype).itemsize for name, shape in source.shapes.items()
    }
    files = shards(sizes, max_shard_bytes)
    jobs = [_ShardJob(source, partial_of(target) / file, dtype, tuple(names)) for file, names in files.items()]
    with _new_folder(target, sum(sizes.values())) as partial:
        _run(_write_shard, jobs, workers)
        if len(files) > 1:
            where = {name: file for file, names in files.items() for name in names}
            total = {"total_size": sum(sizes.values())}
            _write_json(partial / INDEX_NAME, {"metadata": total, "weight_map": dict(sorted(where.items()))})
        _write_companions(source, partial, dtype)
        _check(source, SafetensorsFolder(partial), dtype)


def _require_layout(architecture: Architecture, layout: Layout) -> None:
    """Virtual stages only say which layers a file holds: their schedule, which may not be built, is not asked for."""
    require_layout(architecture, replace(layout, vp=1), "--tp/--pp")
    if layout.pp * layout.vp > architecture.num_layers:
        raise LayoutError(
            f"--vp: pp {layout.pp} * vp {layout.vp} stages are more than {architecture.num_layers} layers; lower them"
        )


@contextmanager
def _new_folder(target: Path, num_bytes: int) -> Iterator[Path]:
    """The partial folder: renamed to `target` when all went well, else removed."""
    start_folder(target, num_bytes, replace=False)
    try:
        yield partial_of(target)
        finish_folder(target)
    except BaseException:
        shutil.rmtree(partial_of(target), ignore_errors=True)
        raise


def _run(action: Callable, jobs: Sequence[Any], workers: int) -> list[Any]:
    """Results of the jobs, in order. Threads are enough: copying, checksums and writing all let go of Python's lock."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(action, jobs))


def _write_blocks(job: _BlocksJob) -> list[Block]:
    source = job.source
    shares = rank_shares(source.architecture, job.layout, source.head, job.tp, job.pp)[job.part :: job.num_parts]
    is_first = job.tp == 0 and job.part == 0
    objects = rank_objects(source.architecture, job.layout, job.pp) if is_first else []

    def blocks() -> Iterator[tuple[str, Box | None, torch.Tensor | None]]:
        for name in objects:
            yield name, None, None
        for share in shares:
            yield from _blocks_of(share, source, job.dtype)

    return write_blocks(job.file, blocks())


def _blocks_of(share: Share, source: Source, dtype: torch.dtype | None) -> Iterator[tuple[str, Box, torch.Tensor]]:
    local = _assembled(share, source, dtype)
    for target, box in share.boxes:
        block = local if len(share.boxes) == 1 else local[slices(box)].clone()
        yield share.place.key, target, block if share.place.layer is None else block[None]


def _assembled(share: Share, source: Source, dtype: torch.dtype | None) -> torch.Tensor:
    """A rank's weight from its pieces; what no piece covers is padding, zero."""
    names = sorted({piece.hf_name for piece in share.local.pieces}) or [next(iter(source.shapes))]
    found = {_dtype(source, name, dtype) for name in names}
    if len(found) > 1:
        raise CheckpointError(
            f"{source.tensors.path}: {', '.join(names)} make up one weight but have several dtypes "
            f"({', '.join(sorted(map(str, found)))}); give --dtype"
        )
    local = torch.zeros(share.local.shape, dtype=found.pop())
    for piece in share.local.pieces:
        local[slices(piece.target)] = source.tensors.read(piece.hf_name, piece.source)
    return local


def _write_shard(job: _ShardJob) -> None:
    source = job.source
    shapes = source.shapes
    wanted = [(name, shapes[name], _dtype(source, name, job.dtype)) for name in job.names]
    write_safetensors(job.file, wanted, lambda name: source.tensors.read(name, whole(shapes[name])))


def _dtype(source: Source, name: str, dtype: torch.dtype | None) -> torch.dtype:
    """A value head is float32 or what it was, whatever the model becomes."""
    return source.tensors.dtype(name) if dtype is None or is_value_head(name) else dtype


def _write_companions(source: Source, folder: Path, dtype: torch.dtype | None) -> None:
    main = _dtype(source, next(iter(source.shapes)), dtype)
    name = str(main).removeprefix("torch.")
    config = exported_config(source.config_folder, source.architecture, source.head, name, source.score_entries())
    _write_json(folder / "config.json", config)
    copy_companions(source.config_folder, folder)


def _check(source: Source, folder: SafetensorsFolder, dtype: torch.dtype | None) -> None:
    """What was written has exactly the tensors, shapes and types that it should."""
    found = {name: (folder.shape(name), folder.dtype(name)) for name in folder.names}
    expected = {name: (shape, _dtype(source, name, dtype)) for name, shape in source.shapes.items()}
    differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if differing:
        raise CheckpointError(f"{folder.path}: read back differently than written: {', '.join(differing[:4])}")


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
