"""From a model in any layout to a Hugging Face folder: the ranks send their boxes to one writer, file by file.

The folder appears under its name only when whole: it is written beside it, opened again and checked, then renamed.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megarlhf.errors import CheckpointError
from megarlhf.models.build import Model
from megarlhf.models.families import FAMILIES
from megarlhf.weights.agree import raise_together
from megarlhf.weights.boxes import LocalTensor, Piece, num_elements, whole
from megarlhf.weights.exchange import DTYPES, exchange
from megarlhf.weights.folder import INDEX_NAME, SINGLE_NAME, SafetensorsFolder
from megarlhf.weights.hf_config import copy_companions, exported_config
from megarlhf.weights.local_map import hf_shapes
from megarlhf.weights.plan import BUCKET_BYTES, holdings, plan_transfers
from megarlhf.weights.transfers import Holding

MAX_SHARD_BYTES = 5 * 2**30
WRITER = 0
"""The rank that writes. It holds one file's tensors in host memory at a time."""


def export_model(
    model: Model,
    path: str | Path,
    *,
    source_folder: str | Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
    replace: bool = False,
) -> None:
    """Write `model` as a Hugging Face folder (collective over the model's world); bit-exact, in the model's dtype.

    Tokenizer, generation settings and chat template are copied byte for byte from `source_folder`, whose config.json is
    kept but for what changed. A value model becomes a LlamaForSequenceClassification with one label. Raises
    CheckpointError on all ranks when `path` is there already (unless `replace`), or cannot be written.
    """
    path, group = Path(path), model.groups.world
    partial = path.parent / f".{path.name}.partial"
    is_writer = dist.get_rank(group) == WRITER
    source, sizes = Path(source_folder), _sizes(model)
    _on_writer(is_writer, lambda: _start(path, partial, source, sum(sizes.values()), replace), group)
    files = _shards(sizes, max_shard_bytes)
    for file, names in files.items():
        tensors = _gathered(model, names, group, bucket_bytes)
        _on_writer(is_writer, lambda: _save(tensors, partial / file), group)  # noqa: B023
    _on_writer(is_writer, lambda: _finish(model, files, source, partial, path), group)


def _on_writer(is_writer: bool, action: Callable[[], None], group: dist.ProcessGroup) -> None:
    """Do something on the writer; a failure is raised on all ranks (collective over `group`)."""
    problem = None
    try:
        if is_writer:
            action()
    except (OSError, ValueError) as error:
        is_ours = isinstance(error, CheckpointError)
        problem = str(error) if is_ours else f"export failed: {type(error).__name__}: {error}"
    raise_together(problem, group)


def _start(path: Path, partial: Path, source: Path, num_bytes: int, replace: bool) -> None:
    """Everything that can be known to fail is found before the ranks send anything."""
    if not (source / "config.json").is_file():
        raise CheckpointError(f"{source}: no config.json to base the export's on; give the folder the model came from")
    if path.exists() and not replace and (path.is_file() or any(path.iterdir())):
        raise CheckpointError(f"{path}: is there already; export to a new folder, or remove this one first")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    free = shutil.disk_usage(partial).free
    if free < num_bytes:
        raise CheckpointError(
            f"{path}: the export needs {num_bytes} bytes, {free} are free; make room or choose another disk"
        )


def _sizes(model: Model) -> dict[str, int]:
    """Bytes of every Hugging Face tensor, in the order of the network."""
    shapes = hf_shapes(model.architecture, model.head)
    return {name: num_elements(whole(shape)) * DTYPES[_dtype(model, name)].itemsize for name, shape in shapes.items()}


def _dtype(model: Model, hf_name: str) -> str:
    """A value head is float32 whatever the model is."""
    is_head = hf_name == FAMILIES[model.architecture.family].value_head.hf[0]
    return "float32" if is_head or model.dtype == torch.float32 else "bfloat16"


def _shards(sizes: dict[str, int], max_shard_bytes: int) -> dict[str, list[str]]:
    """file name -> tensors in it, filled in order; a tensor larger than the limit has a file of its own."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    if len(shards) == 1:
        return {SINGLE_NAME: shards[0]}
    return {f"model-{place + 1:05d}-of-{len(shards):05d}.safetensors": names for place, names in enumerate(shards)}


def _gathered(model: Model, names: list[str], group: dist.ProcessGroup, bucket_bytes: int) -> dict[str, torch.Tensor]:
    """The named tensors, whole, in host memory of the writer; nothing elsewhere (collective over `group`)."""
    shapes = hf_shapes(model.architecture, model.head)
    held = holdings(model.architecture, model.groups.layout, group.size(), model.head)
    made = {id(holding): _only(holding, set(names)) for holding in held}
    wanted = {(0, name): _whole_tensor(name, shapes[name]) for name in names}
    nothing: Holding = {}
    targets = [wanted if rank == WRITER else nothing for rank in range(group.size())]
    sources = [made[id(holding)] for holding in held]
    plan = plan_transfers(sources, targets, lambda name: _dtype(model, name), bucket_bytes)
    parameters = model.named_parameters()
    device = next(iter(parameters.values())).device
    mine = wanted if dist.get_rank(group) == WRITER else nothing
    tensors = {key: torch.empty(tensor.shape, dtype=DTYPES[_dtype(model, key[1])]) for key, tensor in mine.items()}
    exchange(plan, parameters, tensors, group, device)
    return {name: tensor for (_, name), tensor in tensors.items()}


def _whole_tensor(name: str, shape: tuple[int, ...]) -> LocalTensor:
    return LocalTensor(shape, (Piece(name, whole(shape), whole(shape)),))


def _only(holding: Holding, names: set[str]) -> Holding:
    """The local tensors that hold any of the named tensors, without their other pieces."""
    kept = {key: [piece for piece in tensor.pieces if piece.hf_name in names] for key, tensor in holding.items()}
    return {key: LocalTensor(holding[key].shape, tuple(pieces)) for key, pieces in kept.items() if pieces}


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    save_file(tensors, file, metadata={"format": "pt"})
    with file.open("rb") as written:
        os.fsync(written.fileno())


def _finish(model: Model, files: dict[str, list[str]], source: Path, partial: Path, path: Path) -> None:
    sizes = _sizes(model)
    if len(files) > 1:
        where = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(where.items()))}
        (partial / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    dtype = str(model.dtype).removeprefix("torch.")
    config = exported_config(source, model.architecture, model.head, dtype)
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    copy_companions(source, partial)
    _check(model, SafetensorsFolder(partial))
    replaced = path.parent / f".{path.name}.replaced"
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


def _check(model: Model, folder: SafetensorsFolder) -> None:
    """What was written has exactly the tensors, shapes and types that it should."""
    shapes = hf_shapes(model.architecture, model.head)
    found = {name: (folder.shape(name), folder.dtype(name)) for name in folder.names}
    expected = {name: (shape, DTYPES[_dtype(model, name)]) for name, shape in shapes.items()}
    if found != expected:
        differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise CheckpointError(f"{folder.path}: read back differently than written: {', '.join(differing[:4])}")
