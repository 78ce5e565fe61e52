"""Which checkpoints a run folder holds, which of them to go on from, and which may be removed."""

import re
import shutil
from collections.abc import Sequence
from math import isnan
from pathlib import Path

from megarlhf.checkpoints.manifest import MANIFEST_NAME, Manifest, read_manifest
from megarlhf.errors import CheckpointError

FOLDER_NAME = "checkpoints"
_STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")
_LEFT_OVER = re.compile(r"\.step_[0-9]+\.(partial|removed)")


def step_folder(run_folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is."""
    return run_folder / FOLDER_NAME / f"step_{step}"


def found_steps(run_folder: Path) -> list[int]:
    """Steps of the folders that are called like checkpoints, latest first. Other names are nobody's business."""
    try:
        names = [entry.name for entry in (run_folder / FOLDER_NAME).iterdir() if entry.is_dir()]
    except OSError:
        return []
    return sorted((int(match[1]) for name in names if (match := _STEP.fullmatch(name))), reverse=True)


def whole_checkpoints(run_folder: Path) -> tuple[list[Manifest], list[str]]:
    """Manifests of the checkpoints whose files all have their sizes, latest first; and what is wrong with others."""
    manifests, problems = [], []
    for step in found_steps(run_folder):
        folder = step_folder(run_folder, step)
        try:
            manifest = read_manifest(folder)
        except CheckpointError as problem:
            problems.append(str(problem))
            continue
        if manifest.step == step:
            manifests.append(manifest)
        else:
            problems.append(f"{folder / MANIFEST_NAME}: says step {manifest.step}; the folder was renamed")
    return manifests, problems


def steps_to_keep(manifests: Sequence[Manifest], keep_last: int, best: str) -> set[int]:
    """Steps of the latest `keep_last` checkpoints (0: of all), and of the one that is best by the metric `best`.

    The highest value is best, with a leading minus the lowest; of equals the latest.
    """
    latest_first = sorted(manifests, key=lambda manifest: manifest.step, reverse=True)
    kept = {manifest.step for manifest in (latest_first[:keep_last] if keep_last else latest_first)}
    sign = -1.0 if best.startswith("-") else 1.0
    judged = {
        manifest.step: sign * manifest.value
        for manifest in latest_first
        if best and manifest.metric == best and manifest.value is not None and not isnan(manifest.value)
    }
    return kept | {max(judged, key=judged.__getitem__)} if judged else kept


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint: it first loses its name, so that no half of it can be taken for one."""
    removed = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    folder.rename(removed)
    shutil.rmtree(removed)


def remove_left_overs(run_folder: Path) -> None:
    """Removes what interrupted saves and removals left."""
    folder = run_folder / FOLDER_NAME
    for entry in folder.iterdir() if folder.is_dir() else ():
        if _LEFT_OVER.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)


def checkpoint_at(path: Path) -> Path:
    """The checkpoint that a user names: its folder, or the latest whole one of a run folder. Raises CheckpointError."""
    if (path / MANIFEST_NAME).is_file():
        read_manifest(path)
        return path
    manifests, problems = whole_checkpoints(path)
    if manifests:
        return step_folder(path, manifests[0].step)
    reasons = f": {'; '.join(problems)}" if problems else ""
    raise CheckpointError(f"{path}: holds no whole checkpoint{reasons}; give a folder step_N, or a run folder with one")
