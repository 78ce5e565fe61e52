"""The models of a run as the planner sees them: sizes from config.json, or from an architecture file beside the recipe.

A model that has not been downloaded is looked up by the last part of its folder's name: FOLDER.json in `architectures/`
next to the recipe, which is a config.json with one field more, `_source`, that says where its numbers come from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megarlhf.config.runs import AnyRun
from megarlhf.errors import CheckpointError
from megarlhf.loop.roles import Role, attempt, roles
from megarlhf.models.architecture import Architecture, read_json_object

COUNTED_FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe",
)  # fmt: skip
"""Families whose layers are counted."""


@dataclass(frozen=True, kw_only=True)
class PlannedModel(Role):
    """One model of a run, as it would be built. Copies that emulated FP8 keeps are not counted."""

    architecture: Architecture
    """With the labels of a new head."""
    micro_batch_tokens: int = 4096


@dataclass(frozen=True)
class Cast:
    """All models of a run by role, and the files that their sizes were read from."""

    models: Mapping[str, PlannedModel]
    files: tuple[str, ...]
    """`FILE (where its numbers come from)`."""


def cast_of(settings: AnyRun, architectures: Path, violations: list[str]) -> Cast:
    """The models of a run; what cannot be found or built is added to `violations` and left out.

    `architectures` is the folder of architecture files.
    """
    models: dict[str, PlannedModel] = {}
    files: dict[str, None] = {}
    for name, role in roles(settings).items():
        if not role.folder:
            continue
        setting = f"{'actor' if name == 'generator' else name}.model"
        found = attempt(partial(find_architecture, role.folder, architectures), violations, setting)
        if found is not None:
            architecture, file = found
            files[file] = None
            models[name] = _planned(settings, role, architecture)
    violations[:] = dict.fromkeys(violations)
    return Cast(models, tuple(files))


def uncounted(model: PlannedModel) -> list[str]:
    """What the planner has no arithmetic for, although a run may have it."""
    found = []
    if model.architecture.family not in COUNTED_FAMILIES:
        found.append(
            f"{model.name}.model: plan does not count the layers of {model.architecture.family} models yet; it counts "
            f"{', '.join(COUNTED_FAMILIES)}"
        )
    if model.layout.cp > 1:
        found.append(
            f"{model.setting}: plan does not count cp {model.layout.cp} yet; plan with cp 1 and "
            f"about 1/{model.layout.cp} of the tokens a micro-batch"
        )
    return found


def columns_at_work(architecture: Architecture) -> float:
    """Feed-forward columns that a token goes through in a layer, on average over the layers: of the chosen experts."""
    mixture = architecture.mixture
    if mixture is None:
        return architecture.ffn_hidden_size
    num_sparse = len(mixture.layers)
    num_dense = architecture.num_layers - num_sparse
    sparse = mixture.top_k * mixture.ffn_hidden_size
    return (num_dense * architecture.ffn_hidden_size + num_sparse * sparse) / architecture.num_layers


def find_architecture(folder: str, architectures: Path) -> tuple[Architecture, str]:
    """The architecture of a model folder and the file it was read from. Raises CheckpointError naming the choices.

    FOLDER/config.json where there is one; else `folder` itself where it is a JSON file; else FOLDER's name in
    `architectures`.
    """
    named = architectures / f"{Path(folder).name}.json"
    if not (Path(folder) / "config.json").is_file():
        for file in (Path(folder), named):
            if file.is_file():
                return _from_file(file)
        known = sorted(file.stem for file in architectures.glob("*.json"))
        raise CheckpointError(
            f"{folder} has no config.json, and there is no {named}; put the model's config.json at either place"
            + (f" (described there: {', '.join(known)})" if known else "")
        )
    return Architecture.from_folder(folder), str(Path(folder) / "config.json")


def _from_file(file: Path) -> tuple[Architecture, str]:
    config = read_json_object(file, "give a config.json as transformers writes it")
    return Architecture.from_hf(config, where=str(file)), f"{file} ({config.get('_source', 'no source is given')})"


def _planned(settings: AnyRun, role: Role, architecture: Architecture) -> PlannedModel:
    section = vars(settings)["actor" if role.name == "generator" else role.name]
    return PlannedModel(
        **vars(role), architecture=role.built(architecture), micro_batch_tokens=section.micro_batch_tokens
    )
