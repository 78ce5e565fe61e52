"""Defaults that depend on other settings, filled in before a run begins."""

from dataclasses import replace
from typing import Any

from megarlhf.config.runs import AnyRun, OnlineRun

IMPORTANCE_CAP = 2.0
"""Of weights per token, in use where FP8 rollouts are corrected (verl's rollout correction, NeMo-RL's recipes)."""


def filled(settings: AnyRun) -> AnyRun:
    """The settings with `algorithm.importance_cap` decided.

    Where sampling and training compute in different precision the sampler's probabilities are not the trainer's; the
    difference is corrected unless the user said otherwise.
    """
    if not isinstance(settings, OnlineRun) or settings.algorithm.importance_cap is not None:
        return settings
    actor = settings.actor
    differs = actor.generate_fp8 not in (None, actor.fp8)
    algorithm: Any = replace(settings.algorithm, importance_cap=IMPORTANCE_CAP if differs else 0.0)
    return replace(settings, algorithm=algorithm)
