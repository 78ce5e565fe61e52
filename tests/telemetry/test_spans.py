"""Seconds per stage."""

import time

import pytest

from megarlhf.telemetry.spans import Spans


def test_blocks_of_one_name_add_up_and_nested_ones_count_their_own_time():
    spans = Spans()
    start = time.perf_counter()
    with spans("total"):
        for _ in range(2):
            with spans("generate"):
                time.sleep(0.01)
    elapsed = time.perf_counter() - start
    taken = spans.take()
    assert set(taken) == {"time/total_s", "time/generate_s"}
    assert 0.02 <= taken["time/generate_s"] <= taken["time/total_s"] <= elapsed


def test_taking_starts_anew():
    spans = Spans()
    with spans("save"):
        pass
    spans.take()
    assert spans.take() == {}


def test_a_block_that_raises_is_counted():
    spans = Spans()
    with pytest.raises(KeyError), spans("generate"):
        raise KeyError
    assert "time/generate_s" in spans.take()


def test_queued_work_belongs_to_the_block_that_queued_it():
    spans = Spans(synchronize=lambda: time.sleep(0.02))
    with spans("learn"):
        pass
    assert spans.take()["time/learn_s"] >= 0.02


def test_a_dropped_stage_is_not_reported():
    spans = Spans()
    for name in ("generate", "reshard"):
        with spans(name):
            pass
    spans.drop("generate")
    spans.drop("never")
    assert set(spans.take()) == {"time/reshard_s"}
