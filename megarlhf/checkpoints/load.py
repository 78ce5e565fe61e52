"""Reading a checkpoint: the state, and any box of any tensor. Nothing that it holds is run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarlhf.checkpoints.discovery import found_steps, step_folder, whole_checkpoints
from megarlhf.checkpoints.manifest import read_manifest, require_intact
from megarlhf.checkpoints.save import STATE_NAME
from megarlhf.errors import CheckpointError
from megarlhf.parallel.rows import gather_objects
from megarlhf.weights.boxes import Box, move, num_elements, shape_of, slices
from megarlhf.weights.torch_dist import TorchDistFolder


class Checkpoint:
    """An open checkpoint. Raises CheckpointError when it is not whole."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.step = read_manifest(folder).step
        self.state: dict[str, Any] = _read_state(folder / STATE_NAME)
        self._tensors = TorchDistFolder(folder)

    def require_shapes(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises CheckpointError unless the checkpoint holds exactly these tensors."""
        found = {name: self._tensors.shape(name) for name in self._tensors.names}
        differing = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
        if differing:
            lines = [f"{name}: {_shape(found.get(name))} there, {_shape(shapes.get(name))} here" for name in differing]
            more = [f"and {len(lines) - 5} more"] if len(lines) > 5 else []
            raise CheckpointError(
                "\n".join(
                    [f"{self.folder}: is of other models than this run's", *lines[:5], *more, "start in a new run.dir"]
                )
            )

    def fill(self, target: torch.Tensor, name: str, box: Box) -> None:
        """Copies a box of a tensor into `target`, which has its shape. Raises CheckpointError."""
        done = 0
        for where, values in self._tensors.parts(name, box):
            inner = move(where, box, tuple((0, size) for size in shape_of(box)))
            target[slices(inner)].copy_(values)
            done += num_elements(where)
        if done != num_elements(box):
            raise CheckpointError(f"{self.folder}: holds {done} of the {num_elements(box)} elements of {name} {box}")


def _shape(shape: Sequence[int] | None) -> str:
    return "nothing" if shape is None else str(list(shape))


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_bytes())
    except OSError as problem:
        raise CheckpointError(f"{path}: cannot be read ({problem.strerror})") from problem
    except (ValueError, RecursionError) as problem:
        raise CheckpointError(f"{path}: damaged ({problem})") from problem
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: damaged (holds a {type(state).__name__})")
    return state


def latest_intact(run_folder: Path, group: dist.ProcessGroup) -> tuple[Path | None, list[str]]:
    """The latest checkpoint that is intact, and what is wrong with later ones. Collective over `group`.

    The first rank finds the candidates; all ranks read them, a share of the files each, and decide together. Raises
    CheckpointError when there are checkpoints but none can be used: to start anew would throw a run away.
    """
    message: list[Any] = [None]
    if dist.get_rank(group) == 0:
        manifests, problems = whole_checkpoints(run_folder)
        message = [([manifest.step for manifest in manifests], problems, bool(found_steps(run_folder)))]
    dist.broadcast_object_list(message, src=0, group=group)
    steps, problems, has_any = message[0]
    for step in steps:
        folder = step_folder(run_folder, step)
        found = intact_together(folder, group)
        if not found:
            return folder, problems
        problems += found
    if has_any:
        end = f"{run_folder}: none of its checkpoints can be used; set run.overwrite to true to start afresh"
        raise CheckpointError("\n".join([*problems, end]))
    return None, problems


def intact_together(folder: Path, group: dist.ProcessGroup) -> list[str]:
    """What is wrong with a checkpoint, found by all ranks reading a share of its files. Collective over `group`."""
    problem: str | None = None
    try:
        require_intact(folder, read_manifest(folder).files[dist.get_rank(group) :: group.size()])
    except CheckpointError as error:
        problem = str(error)
    return list(dict.fromkeys(text for text in gather_objects(problem, group) if text))
