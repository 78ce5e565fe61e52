"""A gradient that is not finite is applied by nobody, counted by everybody, and ends the run when it keeps coming."""

import re
from dataclasses import replace

import pytest
import torch

from megarlhf.config.layout import Layout
from megarlhf.config.settings import Optimizer
from tests.distributed.pool import run_on_ranks
from tests.engines.layouts import frozen_batch
from tests.engines.test_learner import build_learner, ppo_part
from tests.tiny import write_llama


def poisoned_updates(rank: int, world_size: int, folder: str):
    """Two poisoned updates around a clean one, then poison until the learner gives up; dp 2."""
    from megarlhf.errors import TrainingError

    learner = build_learner(world_size, Layout(), folder, "vocabulary", 4096, Optimizer(learning_rate=1e-3))
    clean = ppo_part(frozen_batch(num_rows=6), "vocabulary")

    def poisoned_loss(prediction, tokens, denominators):
        loss, metrics = clean.objective.loss(prediction, tokens, denominators)
        return (loss * float("nan") if rank == 1 else loss), metrics

    poisoned = replace(clean, objective=replace(clean.objective, loss=poisoned_loss))

    def weights():
        return [parameter.detach().clone() for parameter in learner.model.named_parameters().values()]

    before = weights()
    first = learner.update([poisoned])
    unchanged = all(torch.equal(a, b) for a, b in zip(before, weights(), strict=True))
    rate = learner.learning_rate, learner.num_updates
    second = learner.update([clean])
    moved = any(not torch.equal(a, b) for a, b in zip(before, weights(), strict=True))
    finite = all(bool(tensor.isfinite().all()) for tensor in weights())
    learner.update([poisoned])
    learner.update([poisoned])
    with pytest.raises(TrainingError, match="3 updates in a row") as failure:
        learner.update([poisoned])
    told = re.search(r"with the rows \[([\d, ]+)\] of the data", str(failure.value))
    told_rows = set(map(int, told[1].split(", ")))
    everyone = set(clean.experience.row_id.tolist())
    assert told_rows and told_rows < everyone, "the rows of the rank whose loss was poisoned, and no others"
    return first.applied, unchanged, rate, second.applied, moved, finite, learner.num_skipped


def test_one_ranks_bad_gradient_is_skipped_by_all_ranks(tmp_path):
    folder = str(write_llama(tmp_path / "model", tied=True))
    for applied, unchanged, (rate, updates), then_applied, moved, finite, skipped in run_on_ranks(
        2, poisoned_updates, folder
    ):
        assert not applied and unchanged and updates == 0 and rate == 1e-3
        assert then_applied and moved and finite
        assert skipped == 4
