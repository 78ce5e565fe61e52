"""What `megarlhf replay` is asked: which step, under which layout, and how much may differ."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from megarlhf.config.layout import Layout
from megarlhf.config.runs import AnyRun, OnlineRun
from megarlhf.config.settings import Precision

STAGES = ("logp", "reference", "reward", "value")


@dataclass(frozen=True)
class Replay:
    """Flags of `megarlhf replay RUN_DIR`; all others are settings of the run, laid over those that it had."""

    step: int = 0
    """Step to do again, as metrics.jsonl counts; there must be a capsule of it."""
    layout: str = ""
    """Layout of every model, as in tp2+sp or pp2+dp2; recorded: the run's own; empty: one process."""
    skip: tuple[str, ...] = ()
    """Stages that are not computed again, as what answered is not there now: logp, reference, reward, value."""
    score_tolerance: float | None = None
    """Largest difference of a log-prob, in nats, of a value, a score or a credit; null: 1e-4, in bfloat16 0.25."""
    loss_tolerance: float | None = None
    """Largest difference of a loss, relative to the larger of 1 and the loss; null: 1e-4, in bfloat16 0.02."""
    gradient_tolerance: float | None = None
    """Largest difference of a gradient norm, relative to it; null: 1e-3, in bfloat16 0.1."""
    weight_tolerance: float | None = None
    """Largest root mean square difference of an updated weight, in learning rates times updates; null: 0.02, in
    bfloat16 1."""


@dataclass(frozen=True)
class Tolerances:
    """As in `Replay`, decided."""

    score: float
    loss: float
    gradient: float
    weight: float


_BY_PRECISION: dict[Precision, Tolerances] = {
    "float32": Tolerances(1e-4, 1e-4, 1e-3, 0.02),
    "bfloat16": Tolerances(0.25, 0.02, 0.1, 1.0),
}


def tolerances(options: Replay, precisions: Collection[Precision]) -> Tolerances:
    """The options' own, else those of the coarsest of the models' precisions."""
    usual = _BY_PRECISION["bfloat16" if "bfloat16" in precisions else "float32"]
    given = {name: vars(options)[f"{name}_tolerance"] for name in vars(usual)}
    return replace(usual, **{name: value for name, value in given.items() if value is not None})


def replay_violations(options: Replay, num_ranks: int) -> list[str]:
    """What is wrong with the flags. `num_ranks`: of the layout; 0: it is none."""
    found = [] if num_ranks else [f"--layout: {options.layout!r} is no layout; join sizes by +, as in tp2+sp or pp2"]
    for name in options.skip:
        if name not in STAGES:
            found.append(f"--skip: {name!r} is no stage; accepted: {', '.join(STAGES)}")
    given = {name: value for name, value in vars(options).items() if name.endswith("_tolerance")}
    return found + [
        f"--{name}: {value} is out of range; choose 0 or more"
        for name, value in given.items()
        if value is not None and value < 0
    ]


def in_layout(settings: AnyRun, layout: Layout | None, folder: str) -> AnyRun:
    """The settings with every model in `layout` (None: as they are), nothing sampled, and `folder` for what is written.

    A gap between sampler and trainer, which the run may have been told to stop at, is nothing that is replayed.
    """
    settings = _with(settings, "run", dir=folder, resume="never", overwrite=False)
    if isinstance(settings, OnlineRun):
        settings = _with(settings, "rollout", max_logp_gap=0.0)
        settings = _with(settings, "residency", folder="", generator=None)
    if layout is None:
        return settings
    trained = [name for name in ("actor", "critic", "reward") if name in vars(settings)]
    for name in trained:
        settings = _with(settings, name, train=layout)
    return _with(settings, "actor", generate=Layout()) if isinstance(settings, OnlineRun) else settings


def _with(settings: AnyRun, section: str, **changes: Any) -> AnyRun:
    changed = replace(vars(settings)[section], **changes)
    return replace(settings, **{section: changed})
