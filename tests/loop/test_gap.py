"""A gap between sampler and trainer beyond the limit is told or ends the run; other precisions are corrected for."""

import logging
from dataclasses import replace

import pytest

from megarlhf.config.filled import filled
from megarlhf.config.precision import FP8
from megarlhf.config.runs import GRPORun, SFTRun
from megarlhf.config.settings import Actor, Rollout
from megarlhf.errors import TrainingError
from megarlhf.loop.gap import watch_gap

GAP = {"rollout/logp_gap_max": 0.5}


def test_a_gap_within_the_limit_is_nothing(caplog):
    for limit in (0.0, 0.5, 1.0):
        watch_gap(Rollout(max_logp_gap=limit, on_logp_gap="stop"), GAP, warns=True)
    assert not caplog.records


def test_a_larger_gap_warns_on_one_rank(caplog):
    caplog.set_level(logging.WARNING)
    watch_gap(Rollout(max_logp_gap=0.1), GAP, warns=False)
    assert not caplog.records
    watch_gap(Rollout(max_logp_gap=0.1), GAP, warns=True)
    assert "differs by 0.5 nats" in caplog.text and "actor.generate_fp8" in caplog.text


def test_a_larger_gap_stops_every_rank():
    with pytest.raises(TrainingError, match=r"rollout\.max_logp_gap: .* 0\.5 nats .* more than 0\.1"):
        watch_gap(Rollout(max_logp_gap=0.1, on_logp_gap="stop"), GAP, warns=False)


def test_truncated_importance_sampling_is_on_where_precisions_differ():
    emulated = Actor(layers="emulated_fp8", fp8=FP8("blockwise"))
    assert filled(GRPORun()).algorithm.importance_cap == 0.0
    assert filled(GRPORun(actor=emulated)).algorithm.importance_cap == 0.0
    mixed = GRPORun(actor=replace(emulated, generate_fp8=FP8("off")))
    assert filled(mixed).algorithm.importance_cap == 2.0
    chosen = replace(mixed, algorithm=replace(mixed.algorithm, importance_cap=0.0))
    assert filled(chosen).algorithm.importance_cap == 0.0
    assert filled(SFTRun()) == SFTRun()
