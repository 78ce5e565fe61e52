"""The gap between sampler and trainer, watched: one model on both sides should differ by rounding only."""

import logging
from collections.abc import Mapping

from megarlhf.config.settings import Rollout
from megarlhf.errors import TrainingError

_log = logging.getLogger(__name__)


def watch_gap(settings: Rollout, metrics: Mapping[str, float], *, warns: bool) -> None:
    """Compares a step's `rollout/logp_gap_max` with `rollout.max_logp_gap`; `warns` on one rank of the world.

    Raises TrainingError, on every rank, when it is larger and `rollout.on_logp_gap` is stop.
    """
    limit = settings.max_logp_gap
    if not limit or metrics["rollout/logp_gap_max"] <= limit:
        return
    gap = metrics["rollout/logp_gap_max"]
    words = (
        f"rollout.max_logp_gap: a sampled token's log-prob differs by {gap:.3g} nats between sampler and trainer, more "
        f"than {limit:g}; sample and train in the same precision (actor.generate_fp8), correct for it "
        "(algorithm.importance_cap), or raise the limit"
    )
    if settings.on_logp_gap == "stop":
        raise TrainingError(words)
    if warns:
        _log.warning(words)
