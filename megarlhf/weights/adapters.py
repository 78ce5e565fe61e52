"""LoRA's adapters as PEFT keeps them: a folder of adapter_config.json and adapter_model.safetensors, for any layout.

Where each element of an adapter lives follows from where the weight beside it lives: A has its columns, B its rows.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megarlhf.config.layout import Layout
from megarlhf.config.lora import LINEARS, LoRA
from megarlhf.config.settings import Precision
from megarlhf.errors import CheckpointError
from megarlhf.models.architecture import Architecture
from megarlhf.models.build import Model
from megarlhf.models.families import FAMILIES
from megarlhf.models.head_styles import is_value_head
from megarlhf.models.lora import adapter_parameters, base_parameters
from megarlhf.models.names import Head, Weight, adapted, stage_weights
from megarlhf.parallel.grid import Coordinates, Grid
from megarlhf.weights.agree import raise_together
from megarlhf.weights.boxes import LocalTensor, Piece, num_elements, slices, whole
from megarlhf.weights.gather import gather, on_writer, save_tensors
from megarlhf.weights.local_map import Key, local_map
from megarlhf.weights.partial import finish_folder, partial_of, start_folder
from megarlhf.weights.plan import BUCKET_BYTES
from megarlhf.weights.transfers import Holding

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_FOREIGN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out"), (None, False)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), (None, {})),
    **dict.fromkeys(("layers_to_transform", "layer_replication", "trainable_token_indices"), (None, [])),
    **dict.fromkeys(("modules_to_save",), (None, [], ["score"])),
}
"""Entries of adapter_config.json that change what adapters compute, with the values under which they do what is
computed here."""


def adapter_map(
    architecture: Architecture, layout: Layout, coordinates: Coordinates, head: Head, lora: LoRA
) -> dict[Key, LocalTensor]:
    """Every trained parameter of one rank as pieces of PEFT's tensors: adapters and a value head. Pure."""
    family = FAMILIES[architecture.family]
    beside = local_map(architecture, layout, coordinates, head)
    held: dict[Key, LocalTensor] = {}
    for chunk in range(layout.vp):
        for weight in stage_weights(family, architecture, layout, coordinates.pp, chunk, head, coordinates.ep):
            tensor = beside[chunk, weight.local]
            if adapted(weight, lora):
                stem = weight.local.removesuffix("weight") + "adapter."
                held[chunk, stem + "a"] = _a(weight, tensor, lora)
                held[chunk, stem + "b"] = _b(weight, tensor, lora)
            elif is_value_head(weight.hf[0]):
                (piece,) = tensor.pieces
                name = f"base_model.model.{piece.hf_name}"
                held[chunk, weight.local] = LocalTensor(tensor.shape, (Piece(name, piece.source, piece.target),))
    return held


def _peft_name(hf_name: str, part: str) -> str:
    return f"base_model.model.{hf_name.removesuffix('weight')}{part}weight"


def _a(weight: Weight, beside: LocalTensor, lora: LoRA) -> LocalTensor:
    """The A of each adapted projection below the other, in the columns of the weight beside them."""
    columns = beside.pieces[0].source[1]
    width, pieces = columns[1] - columns[0], []
    for place, name in enumerate(adapted(weight, lora)):
        rows = (place * lora.rank, (place + 1) * lora.rank)
        pieces.append(Piece(_peft_name(name, "lora_A."), ((0, lora.rank), columns), (rows, (0, width))))
    return LocalTensor((len(pieces) * lora.rank, width), tuple(pieces))


def _b(weight: Weight, beside: LocalTensor, lora: LoRA) -> LocalTensor:
    """A row of B for each row of the weight beside it; rows of projections without adapter are in no piece."""
    names, columns = adapted(weight, lora), (0, lora.rank)
    pieces = [
        Piece(_peft_name(piece.hf_name, "lora_B."), (piece.source[0], columns), (piece.target[0], columns))
        for piece in beside.pieces
        if piece.hf_name in names
    ]
    return LocalTensor((beside.shape[0], lora.rank), tuple(pieces))


def adapter_shapes(architecture: Architecture, head: Head, lora: LoRA) -> dict[str, tuple[int, ...]]:
    """Every tensor of PEFT's file with its shape."""
    family, shapes = FAMILIES[architecture.family], {}
    for weight in stage_weights(family, architecture, Layout(), 0, 0, head):
        wanted = adapted(weight, lora)
        for name, (rows, *columns) in weight.tensors.items():
            if name in wanted:
                shapes[_peft_name(name, "lora_A.")] = (lora.rank, *columns)
                shapes[_peft_name(name, "lora_B.")] = (rows, lora.rank)
            elif is_value_head(name):
                shapes[f"base_model.model.{name}"] = (rows, *columns)
    return shapes


def trained_parameters(model: Model) -> dict[Key, torch.nn.Parameter]:
    """This rank's parameters that training changes: its adapters, and a value head. What a checkpoint holds."""
    kept = {key: parameter for key, parameter in base_parameters(model).items() if parameter.requires_grad}
    return adapter_parameters(model) | kept


def export_peft(model: Model, path: str | Path, lora: LoRA, *, base: str, replace: bool = False) -> None:
    """Write the adapters as a folder that PEFT loads (collective over the model's world), bit-exact.

    `base` is the model that the adapters are for, as PEFT should look it up: a folder or a name. A value model's head
    goes with them. Raises CheckpointError on all ranks when `path` is there already (unless `replace`), or cannot be
    written.
    """
    path, group, grid = Path(path), model.groups.world, model.groups.grid
    shapes = adapter_shapes(model.architecture, model.head, lora)
    num_bytes = sum(num_elements(whole(shape)) for shape in shapes.values()) * 4
    on_writer(lambda: start_folder(path, num_bytes, replace), group)
    held = _holdings(model, lora, grid)
    trained = trained_parameters(model)
    device = next(iter(model.named_parameters().values())).device
    tensors = gather(shapes, held, trained, lambda name: _dtype(model, name), group, device, BUCKET_BYTES)

    def write() -> None:
        save_tensors(tensors, partial_of(path) / WEIGHTS_NAME)
        settings = json.dumps(_peft_config(model, lora, base), indent=2)
        (partial_of(path) / CONFIG_NAME).write_text(settings + "\n", encoding="utf-8")
        finish_folder(path)

    on_writer(write, group)


def _holdings(model: Model, lora: LoRA, grid: Grid) -> list[Holding]:
    """What every rank holds; replicas share one object."""
    layout, made = model.groups.layout, {}
    places = [grid.coordinates(rank) for rank in range(grid.world_size)]
    for at in places:
        if (at.tp, at.pp) not in made:
            made[at.tp, at.pp] = adapter_map(model.architecture, layout, at, model.head, lora)
    return [made[at.tp, at.pp] for at in places]


def _dtype(model: Model, name: str) -> Precision:
    """A value head is float32 whatever the model is."""
    is_adapter = ".lora_" in name
    return "bfloat16" if is_adapter and model.dtype == torch.bfloat16 else "float32"


def _peft_config(model: Model, lora: LoRA, base: str) -> dict:
    is_value = model.head == "value"
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if is_value else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
        "modules_to_save": ["score"] if is_value else None,
    }


@dataclass(frozen=True)
class PeftFolder:
    """A folder of adapters, and the model that they are for."""

    path: Path
    base: str
    """Folder of the model, as the adapters' config or the user names it."""
    lora: LoRA


def peft_folder(path: str | Path, base: str = "") -> PeftFolder | None:
    """What PEFT's adapter_config.json in `path` says; None where there is none.

    `base` stands in for the model that it names. Raises CheckpointError for adapters of a kind that cannot be computed
    here, naming every entry.
    """
    path = Path(path)
    if not (path / CONFIG_NAME).is_file():
        return None
    config = _read_settings(path / CONFIG_NAME)
    named, targets = base or str(config.get("base_model_name_or_path") or ""), config.get("target_modules")
    problems = [f"{key} is {config[key]!r}" for key in _FOREIGN if config.get(key) not in _FOREIGN[key]]
    if type(config.get("r")) is not int or type(config.get("lora_alpha")) not in (int, float):
        problems.append(f"r and lora_alpha are {config.get('r')!r} and {config.get('lora_alpha')!r}")
    if not isinstance(targets, list) or not set(targets) <= set(LINEARS):
        problems.append(f"target_modules is {targets!r}; supported: a list of {', '.join(LINEARS)}")
    if problems:
        raise CheckpointError(f"{path / CONFIG_NAME}: these adapters are not supported: {'; '.join(problems)}")
    if not (Path(named) / "config.json").is_file():
        raise CheckpointError(
            f"{path / CONFIG_NAME}: the adapters are for {named or 'a model without a name'}, which is no model folder "
            "here; give its folder with --base"
        )
    return PeftFolder(path, named, LoRA(config["r"], config["lora_alpha"], tuple(targets)))


@torch.no_grad()
def load_peft(model: Model, path: str | Path, lora: LoRA) -> None:
    """Fill the adapters of `model` from a folder that `export_peft` or PEFT wrote; each rank reads its own boxes.

    Collective over the model's world only to fail together. Raises CheckpointError, before any weight changes, when
    the folder's rank, alpha or targets are not `lora`'s, or its tensors not the model's.
    """
    problem = None
    try:
        _load(model, Path(path), lora)
    except CheckpointError as error:
        problem = str(error)
    raise_together(problem, model.groups.world)


def _load(model: Model, path: Path, lora: LoRA) -> None:
    _require_settings(path / CONFIG_NAME, lora)
    shapes = adapter_shapes(model.architecture, model.head, lora)
    held = adapter_map(model.architecture, model.groups.layout, model.groups.coordinates, model.head, lora)
    trained = trained_parameters(model)
    assert held.keys() == trained.keys(), f"adapters and name table differ in {sorted(held.keys() ^ trained.keys())}"
    try:
        with safe_open(path / WEIGHTS_NAME, framework="pt", device="cpu") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            _require_match(path / WEIGHTS_NAME, found, shapes)
            for key, tensor in held.items():
                for piece in tensor.pieces:
                    rows = file.get_slice(piece.hf_name)[slices(piece.source)]
                    trained[key][slices(piece.target)].copy_(rows)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path / WEIGHTS_NAME}: cannot be read ({error}); give a folder of a LoRA") from error


def _require_settings(file: Path, lora: LoRA) -> None:
    config = _read_settings(file)
    wanted = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": sorted(lora.targets)}
    found = {"r": config.get("r"), "lora_alpha": config.get("lora_alpha"), "target_modules": _targets(config)}
    names = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targets"}
    problems = [
        f"{file}: {key} is {found[key]}, lora.{names[key]} is {wanted[key]}; make them agree"
        for key in wanted
        if found[key] != wanted[key]
    ]
    if problems:
        raise CheckpointError("\n".join(problems))


def _read_settings(file: Path) -> dict:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); give a folder of a LoRA") from error
    return config


def _targets(config: dict) -> list[str] | str | None:
    targets = config.get("target_modules")
    return sorted(targets) if isinstance(targets, list) else targets


def _require_match(file: Path, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    differing = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"{file}: {len(differing)} tensors are not this model's, for example {name}: the file has "
            f"{found.get(name, 'none')}, the model needs {wanted.get(name, 'none')}; give adapters of this model"
        )
