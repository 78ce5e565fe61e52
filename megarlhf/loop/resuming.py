"""Where a run begins: at its first step, or at a checkpoint of the same run; and what may not be written over."""

import json
import logging
import shutil
from pathlib import Path

import torch.distributed as dist
import yaml

from megarlhf.checkpoints.capsule import FOLDER_NAME as CAPSULES
from megarlhf.checkpoints.discovery import FOLDER_NAME, checkpoint_at, found_steps, step_folder, whole_checkpoints
from megarlhf.checkpoints.fingerprint import folder_fingerprint
from megarlhf.checkpoints.load import Checkpoint, intact_together, latest_intact
from megarlhf.checkpoints.save import STATE_NAME
from megarlhf.config.changes import changed
from megarlhf.config.filled import filled
from megarlhf.config.load import to_dict
from megarlhf.config.runs import AnyRun, RewardModelRun, SFTRun
from megarlhf.errors import CheckpointError, ConfigError
from megarlhf.loop.roles import roles
from megarlhf.telemetry.jsonl import SHOWN_NAME
from megarlhf.telemetry.status import DONE, read_status
from megarlhf.weights.gather import on_writer

_EXPORTS = ("hf", "hf_lora", "hf_average", "exports")
_HELD = ("metrics.jsonl", FOLDER_NAME, "hf", "exports")

_log = logging.getLogger(__name__)


def folder_violations(settings: AnyRun) -> list[str]:
    """Why this run may not write to run.dir; a folder that it may go on in, or begin in, gives none."""
    run, folder = settings.run, Path(settings.run.dir)
    held = [name for name in _HELD if (folder / name).exists()]
    found = [] if run.resume in ("auto", "never") else _source_violations(Path(run.resume))
    if run.overwrite:
        is_inside = Path(run.resume).absolute().is_relative_to(folder.absolute())
        gone = f"run.resume: {run.resume} is inside run.dir, which run.overwrite empties; choose another run.dir"
        return found + ([gone] if is_inside else [])
    if not held:
        return found
    again = "choose another folder, or set run.overwrite to true to start afresh"
    holds = f"run.dir: {folder} already holds a run ({', '.join(held)})"
    if run.resume == "never":
        return [f"{holds}, and run.resume is never; {again}"]
    if found_steps(folder):
        return found + _continuation_violations(settings, folder, holds, again)
    if run.checkpoint_every and _is_unfinished(folder) and not _changes_since_start(settings, folder):
        return found  # it was stopped before its first checkpoint, and begins again
    return [*found, f"{holds}, and no checkpoint to go on from; {again}"]


def _continuation_violations(settings: AnyRun, folder: Path, holds: str, again: str) -> list[str]:
    manifests, _ = whole_checkpoints(folder)
    if not manifests:
        return []  # told when all ranks have looked, with what is wrong with each
    latest = step_folder(folder, manifests[0].step)
    try:
        before = json.loads((latest / STATE_NAME).read_bytes())["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    differing = changed(before, to_dict(filled(settings)))
    if differing:
        return [
            f"run.dir: {latest} is a checkpoint of a run with other settings, {'; '.join(differing)}; take those back, "
            f"or start from it in another run.dir with run.resume {latest}"
        ]
    if not _is_unfinished(folder) and _length(before) == _length(to_dict(settings)):
        return [f"{holds}, which is finished; {again}; more run.steps or data.epochs continue it"]
    return []


def _length(settings: dict) -> tuple:
    """What says how long a run is."""
    return settings["run"].get("steps"), settings["data"].get("epochs")


def _source_violations(path: Path) -> list[str]:
    try:
        checkpoint_at(path)
    except CheckpointError as problem:
        return [f"run.resume: {problem}"]
    return []


def _is_unfinished(folder: Path) -> bool:
    try:
        return read_status(folder)[0] != DONE
    except (OSError, ValueError, KeyError):
        return True


def _changes_since_start(settings: AnyRun, folder: Path) -> list[str]:
    try:
        before = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        return changed(before, to_dict(filled(settings)))
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return ["config.yaml: cannot be read"]


def find_start(settings: AnyRun, group: dist.ProcessGroup) -> Checkpoint | None:
    """The checkpoint that the run goes on from, or None: it begins. Collective over `group`.

    What an earlier run left in a folder that is begun afresh is removed. Raises ConfigError when the checkpoint is of
    another run, CheckpointError when none of several can be used.
    """
    run, folder = settings.run, Path(settings.run.dir)
    if run.overwrite:
        on_writer(lambda: _clear(folder), group)
    found, problems = (None, []) if run.resume == "never" else latest_intact(folder, group)
    is_own = found is not None
    if not is_own and run.resume not in ("auto", "never"):
        found = checkpoint_at(Path(run.resume))
        damage = intact_together(found, group)
        if damage:
            raise CheckpointError("\n".join([f"run.resume: {found} is damaged", *damage]))
    if dist.get_rank(group) == 0:
        for problem in problems:
            _log.warning("run.resume: %s; an earlier checkpoint is used", problem)
        _announce(found, folder)
    if found is None:
        on_writer(lambda: _clear(folder), group)
        return None
    checkpoint = Checkpoint(found)
    _require_same(settings, checkpoint, is_own)
    return checkpoint


def _announce(found: Path | None, folder: Path) -> None:
    if found is not None:
        _log.info("run.resume: goes on from %s", found)
    elif (folder / "metrics.jsonl").exists():
        _log.warning("run.resume: %s has no checkpoint; the run begins at its first step", folder)


def _clear(folder: Path) -> None:
    for name in (FOLDER_NAME, CAPSULES, *_EXPORTS):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / SHOWN_NAME).unlink(missing_ok=True)


def _require_same(settings: AnyRun, checkpoint: Checkpoint, is_own: bool) -> None:
    try:
        before, models = checkpoint.state["settings"], checkpoint.state["models"]
        differing = changed(before, to_dict(settings))
        now = model_fingerprints(settings)
        others = [name for name in now if name in models and models[name] != now[name]]
    except (KeyError, TypeError, AttributeError) as problem:
        raise CheckpointError(f"{checkpoint.folder / STATE_NAME}: damaged ({problem!r})") from problem
    wrong = [
        f"{name}: the folder holds another model or tokenizer than the one that {checkpoint.folder} was trained from; "
        "give that one"
        for name in others
    ]
    if differing and is_own:
        wrong.append(f"run.dir: {checkpoint.folder} is of a run with other settings: {'; '.join(differing)}")
    elif differing and dist.get_rank() == 0:
        _log.warning("run.resume: settings differ from the checkpoint's: %s", "; ".join(differing))
    if wrong:
        raise ConfigError(wrong)


def model_fingerprints(settings: AnyRun) -> dict[str, str]:
    """By setting, which model its folder holds."""
    folders = {f"{name}.model": role.folder for name, role in roles(settings).items() if name != "generator"}
    if not isinstance(settings, SFTRun | RewardModelRun) and settings.reference.model:
        folders["reference.model"] = settings.reference.model
    return {name: folder_fingerprint(folder) for name, folder in folders.items()}
