"""From a model in any layout to a Hugging Face folder: the ranks send their boxes to one writer, file by file.

The folder appears under its name only when whole: it is written beside it, opened again and checked, then renamed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megarlhf.config.settings import Precision
from megarlhf.errors import CheckpointError
from megarlhf.models.build import Model
from megarlhf.models.head_styles import is_value_head
from megarlhf.models.lora import merged_parameters
from megarlhf.weights.boxes import num_elements, whole
from megarlhf.weights.exchange import DTYPES
from megarlhf.weights.folder import INDEX_NAME, SafetensorsFolder
from megarlhf.weights.gather import gather, on_writer, save_tensors
from megarlhf.weights.hf_config import copy_companions, exported_config
from megarlhf.weights.local_map import Key, hf_shapes
from megarlhf.weights.partial import finish_folder, partial_of, start_folder
from megarlhf.weights.plan import BUCKET_BYTES, holdings
from megarlhf.weights.safetensors_file import MAX_SHARD_BYTES, shards


def export_model(
    model: Model,
    path: str | Path,
    *,
    source_folder: str | Path,
    tensors: Mapping[Key, torch.Tensor] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
    replace: bool = False,
    entries: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write `model` as a Hugging Face folder (collective over the model's world); bit-exact, in the model's dtype.

    `tensors` are what to write, by the keys of the model's own parameters and shaped like them (an average of the
    weights, say); by default the model's weights, with LoRA's adapters merged in.
    Tokenizer, generation settings and chat template are copied byte for byte from `source_folder`, whose config.json is
    kept but for what changed: what it said about scores goes, `entries` come in (see `models/score_config.py`). A value
    model becomes a ...ForSequenceClassification, or, if its head has a bias, a ...ForTokenClassification, as
    transformers' other class has none. Raises CheckpointError on all ranks when `path` is there already (unless
    `replace`), or cannot be written.
    """
    path, source, group, sizes = Path(path), Path(source_folder), model.groups.world, _sizes(model)
    tensors = merged_parameters(model) if tensors is None else tensors
    shapes = hf_shapes(model.architecture, model.head)
    held = holdings(model.architecture, model.groups.layout, group.size(), model.head)
    device = next(iter(model.named_parameters().values())).device
    on_writer(lambda: _start(path, source, sum(sizes.values()), replace), group)
    files = shards(sizes, max_shard_bytes)
    for file, names in files.items():
        wanted = {name: shapes[name] for name in names}
        gathered = gather(wanted, held, tensors, lambda name: _dtype(model, name), group, device, bucket_bytes)
        on_writer(lambda: save_tensors(gathered, partial_of(path) / file), group)  # noqa: B023
    on_writer(lambda: _finish(model, files, source, path, entries), group)


def _start(path: Path, source: Path, num_bytes: int, replace: bool) -> None:
    if not (source / "config.json").is_file():
        raise CheckpointError(f"{source}: no config.json to base the export's on; give the folder the model came from")
    start_folder(path, num_bytes, replace)


def _sizes(model: Model) -> dict[str, int]:
    """Bytes of every Hugging Face tensor, in the order of the network."""
    shapes = hf_shapes(model.architecture, model.head)
    return {name: num_elements(whole(shape)) * DTYPES[_dtype(model, name)].itemsize for name, shape in shapes.items()}


def _dtype(model: Model, hf_name: str) -> Precision:
    """A value head is float32 whatever the model is."""
    return "float32" if is_value_head(hf_name) or model.dtype == torch.float32 else "bfloat16"


def _finish(model: Model, files: dict[str, list[str]], source: Path, path: Path, entries: Mapping[str, Any]) -> None:
    sizes, partial = _sizes(model), partial_of(path)
    if len(files) > 1:
        where = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(where.items()))}
        (partial / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    dtype = str(model.dtype).removeprefix("torch.")
    config = exported_config(source, model.architecture, model.head, dtype, entries)
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    copy_companions(source, partial)
    _check(model, SafetensorsFolder(partial))
    finish_folder(path)


def _check(model: Model, folder: SafetensorsFolder) -> None:
    """What was written has exactly the tensors, shapes and types that it should."""
    shapes = hf_shapes(model.architecture, model.head)
    found = {name: (folder.shape(name), folder.dtype(name)) for name in folder.names}
    expected = {name: (shape, DTYPES[_dtype(model, name)]) for name, shape in shapes.items()}
    if found != expected:
        differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise CheckpointError(f"{folder.path}: read back differently than written: {', '.join(differing[:4])}")
