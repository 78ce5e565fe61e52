"""A capsule: one step of a run as its stages saw it, small enough to keep, from which the step can be done again.

RUN_DIR/capsules/step_N holds `batch.safetensors` (the record's tensors), `capsule.json` (texts, states, what the step
gave) and `config.yaml` (the settings). Weights are those of the checkpoint before the step. Step N is the one that
metrics.jsonl calls N; nothing that is read here is run.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from megarlhf.errors import CheckpointError
from megarlhf.models.architecture import read_json_object
from megarlhf.records.experience import Experience
from megarlhf.weights.gather import save_tensors
from megarlhf.weights.partial import finish_folder, partial_of, to_disk

FOLDER_NAME, FORMAT = "capsules", 1
_BATCH, _ABOUT, CONFIG = "batch.safetensors", "capsule.json", "config.yaml"
_TEXTS = ("prompts", "responses", "metadata")
BYTES_PER_TOKEN = 64
"""At most: ids, mask, nine numbers, and the text."""


@dataclass(frozen=True)
class Capsule:
    """A step. What it gave is plain values, which `loop.tape` writes and `loop.replay` compares with."""

    step: int
    scored: Experience
    """As credit read it."""
    credited: Experience
    """As the learners read it; without texts."""
    about: Mapping[str, Any]
    config: str
    """The run's settings as YAML."""


def capsule_folder(run_folder: Path, step: int) -> Path:
    """Where the capsule of step `step` is."""
    return run_folder / FOLDER_NAME / f"step_{step}"


def capsule_steps(run_folder: Path) -> list[int]:
    """Steps that there are capsules of, in their order."""
    places = (run_folder / FOLDER_NAME).glob("step_*")
    names = [place.name.removeprefix("step_") for place in places if (place / _ABOUT).is_file()]
    return sorted(int(name) for name in names if name.isdecimal())


def write_capsule(run_folder: Path, capsule: Capsule) -> None:
    """The folder appears under its name when it is whole and on the disk. Raises OSError."""
    folder = capsule_folder(run_folder, capsule.step)
    partial = partial_of(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    scored = _tensors(capsule.scored)
    own = {name: one for name, one in _tensors(capsule.credited).items() if one is not scored.get(name)}
    named = {f"scored.{name}": one for name, one in scored.items()}
    named |= {f"credited.{name}": one for name, one in own.items()}
    save_tensors({name: one.clone().contiguous() for name, one in named.items()}, partial / _BATCH)
    texts = {name: list(vars(capsule.scored)[name]) for name in _TEXTS}
    about = {"format": FORMAT, "step": capsule.step, **capsule.about, "texts": texts}
    # Metadata of a Parquet file may hold dates and the like: kept as text.
    (partial / _ABOUT).write_text(json.dumps(about, indent=1, ensure_ascii=False, default=str), encoding="utf-8")
    (partial / CONFIG).write_text(capsule.config, encoding="utf-8")
    for place in (partial / _ABOUT, partial / CONFIG, partial):
        to_disk(place)
    finish_folder(folder)


def read_capsule(run_folder: Path, step: int) -> Capsule:
    """Raises CheckpointError: there is none, with the steps that there are, or it is damaged."""
    folder = capsule_folder(run_folder, step)
    if step not in capsule_steps(run_folder):
        raise CheckpointError(f"{folder}: there is no capsule of step {step}; {what_there_is(run_folder)}")
    move = "the capsule is damaged; choose another step"
    try:
        about = read_json_object(folder / _ABOUT, move)
        if about["format"] != FORMAT or about["step"] != step:
            raise CheckpointError(f"{folder}: is of step {about['step']} in format {about['format']}; {move}")
        tensors = load_file(folder / _BATCH)
        scored = _experience(tensors, "scored.", {name: tuple(about["texts"][name]) for name in _TEXTS})
        whole = {name.replace("scored.", "credited."): one for name, one in tensors.items() if "scored." in name}
        credited = _experience(whole | tensors, "credited.", {})
        return Capsule(step, scored, credited, about, (folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, SafetensorError, KeyError, TypeError, AssertionError) as problem:
        raise CheckpointError(f"{folder}: {type(problem).__name__}: {problem}; {move}") from problem


def what_there_is(run_folder: Path) -> str:
    """In words, the steps that can be asked for."""
    steps = capsule_steps(run_folder)
    if steps:
        return f"there are capsules of step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
    return f"{run_folder} has none: a run keeps them with run.keep_capsules (and run.checkpoint_every)"


def prune_capsules(run_folder: Path, keep: int, checkpoints: Sequence[int]) -> None:
    """Keeps the latest `keep`, and of those only such whose step begins at the model folders, outside of the run
    folder, or at one of the run's checkpoints that are still there."""
    steps = capsule_steps(run_folder)
    for step in steps:
        folder = capsule_folder(run_folder, step)
        try:
            start = str(read_json_object(folder / _ABOUT, "remove it").get("start", ""))
        except CheckpointError:  # damaged by hand: a run does not end for it, and replay tells it
            start = ""
        is_gone = bool(start) and not Path(start).is_absolute() and step - 1 not in checkpoints
        if is_gone or step not in steps[-keep:]:
            shutil.rmtree(folder)


def _tensors(experience: Experience) -> dict[str, torch.Tensor]:
    found = {item.name: vars(experience)[item.name] for item in fields(experience)}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def _experience(tensors: Mapping[str, torch.Tensor], prefix: str, texts: Mapping[str, tuple]) -> Experience:
    own: dict[str, Any] = {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
    return Experience(**(own | dict(texts)))
