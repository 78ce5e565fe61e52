"""A gradient that is not finite is applied by nobody, counted by everybody, and ends the run when it keeps coming."""

import pytest
import torch

from megarlhf.config.layout import Layout
from megarlhf.config.settings import Optimizer
from tests.distributed.pool import run_on_ranks
from tests.engines.layouts import frozen_batch
from tests.engines.test_learner import build_learner
from tests.tiny import write_llama


def poisoned_updates(rank: int, world_size: int, folder: str):
    """Two poisoned updates around a clean one, then poison until the learner gives up; dp 2."""
    from megarlhf.errors import TrainingError

    learner = build_learner(world_size, Layout(), folder, "vocabulary", 4096, Optimizer(learning_rate=1e-3))
    clean = learner.loss
    batch = frozen_batch(num_rows=6)

    def poisoned(prediction, tokens, denominators):
        loss, metrics = clean(prediction, tokens, denominators)
        return (loss * float("nan") if rank == 1 else loss), metrics

    def weights():
        return [parameter.detach().clone() for parameter in learner.model.named_parameters().values()]

    before = weights()
    learner.loss = poisoned
    first = learner.update(batch)
    unchanged = all(torch.equal(a, b) for a, b in zip(before, weights(), strict=True))
    rate = learner.learning_rate, learner.num_updates
    learner.loss = clean
    second = learner.update(batch)
    moved = any(not torch.equal(a, b) for a, b in zip(before, weights(), strict=True))
    finite = all(bool(tensor.isfinite().all()) for tensor in weights())
    learner.loss = poisoned
    learner.update(batch)
    learner.update(batch)
    with pytest.raises(TrainingError, match="3 updates in a row"):
        learner.update(batch)
    return first.applied, unchanged, rate, second.applied, moved, finite, learner.num_skipped


def test_one_ranks_bad_gradient_is_skipped_by_all_ranks(tmp_path):
    folder = str(write_llama(tmp_path / "model", tied=True))
    for applied, unchanged, (rate, updates), then_applied, moved, finite, skipped in run_on_ranks(
        2, poisoned_updates, folder
    ):
        assert not applied and unchanged and updates == 0 and rate == 1e-3
        assert then_applied and moved and finite
        assert skipped == 4
