"""Whether the disk has room for checkpoints and capsules: known before the first step, not at the first save."""

import shutil
from math import prod
from pathlib import Path

from megarlhf.checkpoints.capsule import BYTES_PER_TOKEN
from megarlhf.config.runs import AnyRun, OnlineRun
from megarlhf.loop.roles import Role
from megarlhf.models.architecture import Architecture
from megarlhf.weights.adapters import adapter_shapes
from megarlhf.weights.local_map import hf_shapes

_BYTES = 12
"""Of a trained parameter in a checkpoint: weight and two moments in float32."""
_LEARNERS = ("actor", "critic")


def checkpoint_bytes(cast: dict[str, Role], models: dict[str, Architecture]) -> int:
    """Size of one checkpoint, without averages."""
    learners = _LEARNERS if "actor" in cast else ("reward",)
    return sum(_BYTES * _num_trained(cast[name], models[name]) for name in learners if name in models)


def _num_trained(role: Role, architecture: Architecture) -> int:
    shapes = (
        adapter_shapes(architecture, role.head, role.lora) if role.lora.rank else hf_shapes(architecture, role.head)
    )
    return sum(prod(shape) for shape in shapes.values())


def capsule_bytes(settings: AnyRun) -> int:
    """At most that of one capsule: all rows of a step as long as they may be."""
    if isinstance(settings, OnlineRun):
        rollout = settings.rollout
        rows = rollout.batch_size * rollout.samples_per_prompt
        return rows * (settings.data.max_prompt_tokens + rollout.max_new_tokens) * BYTES_PER_TOKEN
    return 2 * settings.data.batch_size * settings.data.max_tokens * BYTES_PER_TOKEN  # a comparison has two answers


def room_violations(settings: AnyRun, cast: dict[str, Role], models: dict[str, Architecture]) -> list[str]:
    """Too little room for the checkpoints that are kept, the best one and the one being written, and for capsules."""
    run = settings.run
    if not run.checkpoint_every and not run.keep_capsules:
        return []
    count = (max(1, run.keep_checkpoints) + bool(run.keep_best) + 1) * bool(run.checkpoint_every)
    one, others = (
        checkpoint_bytes(cast, models),
        (run.keep_capsules + bool(run.keep_capsules)) * capsule_bytes(settings),
    )
    place = next(path for path in (Path(run.dir).absolute(), *Path(run.dir).absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    needed = count * one + others
    if free >= needed:
        return []
    more = f"; with capsules (run.keep_capsules {run.keep_capsules}) {needed / 2**30:.1f}" if others else ""
    return [
        f"run.dir: {place} has {free / 2**30:.1f} GiB free; {count} checkpoints (run.keep_checkpoints "
        f"{run.keep_checkpoints}, and one being written) of {one / 2**30:.1f} GiB need "
        f"{count * one / 2**30:.1f}{more}; make room, choose another disk, or keep fewer"
    ]
