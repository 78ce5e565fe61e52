"""Cache and reshard: the planner's bytes against a real generator's cache and the buffers that really cross ranks."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from megarlhf.config.layout import Layout
from megarlhf.loop.planner.cache import cache_bytes
from megarlhf.loop.planner.models import PlannedModel
from megarlhf.loop.planner.reshard import reshard_summary
from megarlhf.parallel.grid import Grid
from tests.distributed.pool import run_on_ranks
from tests.loop.planner.measured import planned

PAIRS = {
    "tp2 to dp2": (2, Layout(tp=2), Layout(), {}),
    "pp2 to tp2, tied, bfloat16": (2, Layout(pp=2), Layout(tp=2), {"tied": True, "dtype": "bfloat16"}),
    "pp2 dp2 to tp4, few groups": (4, Layout(pp=2), Layout(tp=4), {"num_key_value_heads": 2}),
    "tp2 pp2 to dp2 tp2, uneven": (4, Layout(tp=2, pp=2, sp=True), Layout(tp=2), {"num_hidden_layers": 3}),
    "value head": (2, Layout(tp=2, sp=True), Layout(pp=2), {"head": "value", "dtype": "bfloat16"}),
}


def generator_of(layout: Layout, **fields) -> PlannedModel:
    from dataclasses import replace

    return replace(planned(layout, **fields), name="generator", is_trained=False)


def real(model: PlannedModel, world_size: int):
    from megarlhf.models.build import build_model
    from megarlhf.parallel.groups import build_groups

    groups = build_groups(model.layout, world_size)
    return build_model(model.architecture, groups, head=model.head, dtype=getattr(torch, model.dtype))


@contextmanager
def counted_messages(sent: list[int]):
    """Notes the bytes of every tensor that this rank sends."""
    make = dist.P2POp

    def noting(operation, tensor, *rest):
        if operation is dist.isend:
            sent.append(tensor.nbytes)
        return make(operation, tensor, *rest)

    dist.P2POp = noting
    try:
        yield
    finally:
        dist.P2POp = make


def moved(rank: int, world_size: int, source: PlannedModel, target: PlannedModel) -> list[int]:
    """Bytes of the messages that this rank sends in a real reshard."""
    from megarlhf.weights.exchange import Resharder

    resharder, sent = Resharder(real(source, world_size), real(target, world_size), shares_memory=False), []
    with counted_messages(sent):
        resharder.run(is_checked=True)
    return sent


@pytest.mark.parametrize("case", PAIRS)
def test_reshard_bytes_are_those_that_cross_ranks(case):
    world_size, source, target, fields = PAIRS[case]
    source, target = planned(source, **fields), generator_of(target, **fields)
    found = run_on_ranks(world_size, moved, source, target)
    summary = reshard_summary(source, target, world_size, gpus_per_node=2, check=True)
    assert sum(map(len, found)) == summary.num_messages
    # A box starts at a multiple of 8 bytes in a message, which may leave up to 6 bytes after each.
    sent = [node + far for node, far in zip(summary.sent["node"], summary.sent["network"], strict=True)]
    assert tuple(sum(sizes) for sizes in found) == summary.buffer_bytes
    assert all(0 <= there - here <= there / 10 for there, here in zip(summary.buffer_bytes, sent, strict=True))
    far = sum(size for (giver, taker), size in summary.pairs.items() if giver // 2 != taker // 2)
    assert sum(summary.sent["network"]) == sum(summary.received["network"]) == far


def cached(rank: int, world_size: int, model: PlannedModel, num_slots: int, capacity: int) -> int:
    """Bytes of the cache that a real flight holds."""
    from megarlhf.engines.generator.flight import Flight
    from megarlhf.engines.generator.requests import Request, Sampling

    requests = [Request(tuple(range(1, capacity - 3)), row) for row in range(num_slots)]
    flight = Flight(real(model, world_size), requests, Sampling(max_new_tokens=4), num_slots, 64)
    return flight._cache.blocks.nbytes


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        (Layout(), {}),
        (Layout(pp=2), {"num_hidden_layers": 3, "dtype": "bfloat16"}),
        (Layout(tp=2), {"family": "qwen3"}),
        (Layout(tp=4), {"num_key_value_heads": 2}),
    ],
    ids=str,
)
def test_cache_bytes_are_those_of_a_flight(layout, fields):
    model, grid = generator_of(layout, **fields), Grid(layout, layout.model_ranks)
    found = run_on_ranks(layout.model_ranks, cached, model, 3, 20)
    stages = [grid.coordinates(rank).pp for rank in range(layout.model_ranks)]
    assert found == [cache_bytes(model, stage, 3, 20, on_gpu=False) for stage in stages]
