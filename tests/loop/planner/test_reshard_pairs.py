"""Hundreds of pairs of layouts, drawn over all tensor and pipeline sizes up to 8: every element arrives once."""

import random
from math import lcm

import pytest

from megarlhf.config.layout import Layout
from megarlhf.loop.planner.reshard import summary
from megarlhf.models.architecture import Architecture, layout_violations
from megarlhf.weights.boxes import num_elements
from megarlhf.weights.plan import holdings, reshard_plan, validate
from megarlhf.weights.transfers import ReshardPlan
from tests.tiny import tiny_config

HEADS = {24: (1, 2, 3, 4, 6, 8), 20: (1, 2, 4, 5), 28: (1, 2, 4, 7)}
"""Attention heads, and the tensor sizes that divide them (and the feed-forward columns)."""
GROUPS = {24: (1, 2, 4, 8, 12), 20: (1, 2, 4, 10), 28: (1, 2, 14)}
"""Key/value groups: fewer and more than tensor ranks."""
MAX_RANKS, BUCKET = 24, 16384


def architecture_of(draw: random.Random, heads: int, head: str) -> Architecture:
    groups = draw.choice(GROUPS[heads])
    fields = {"hidden_size": 4, "intermediate_size": 840, "head_dim": 2, "num_hidden_layers": draw.randint(8, 10)}
    config = tiny_config(
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=draw.choice((13, 97, 101)),  # of no tensor size a multiple
        tied=draw.random() < 0.5,
        num_labels=int(head == "value"),
        **fields,
    )
    return Architecture.from_hf(config)


def layout_of(draw: random.Random, heads: int, architecture: Architecture) -> Layout:
    while True:
        pp, tp = draw.randint(1, 8), draw.choice(HEADS[heads])
        vp = draw.choice((1, 1, 2, 3)) if 1 < pp < 5 else 1
        first = draw.choice((0, 0, 1, 2)) if pp > 1 else 0
        layout = Layout(tp=tp, pp=pp, vp=vp, sp=tp > 1, first_stage_layers=first)
        if tp * pp <= MAX_RANKS and not layout_violations(architecture, layout, "layout"):
            return layout


def pair_of(draw: random.Random, heads: int, head: str) -> tuple[Architecture, Layout, Layout, int]:
    """A model, two layouts of it, and a world that holds whole copies of both, at times several of each."""
    while True:
        architecture = architecture_of(draw, heads, head)
        source, target = (layout_of(draw, heads, architecture) for _ in range(2))
        world_size = lcm(source.model_ranks, target.model_ranks)
        if world_size <= MAX_RANKS:
            return architecture, source, target, world_size * draw.choice((1, 1, 1, MAX_RANKS // world_size))


def elements_written(plan: ReshardPlan) -> dict[tuple[int, tuple], list[set[tuple]]]:
    """By (rank, local tensor) the elements that each transfer writes: counted one by one, apart from `validate`."""
    found: dict[tuple[int, tuple], list[set[tuple]]] = {}
    for transfer in [*plan.copies, *(one for message in plan.messages for one in message.transfers)]:
        cells: set[tuple] = {()}
        for start, stop in transfer.target_box:
            cells = {(*cell, place) for cell in cells for place in range(start, stop)}
        found.setdefault((transfer.target_rank, transfer.target), []).append(cells)
    return found


@pytest.mark.parametrize("head", ["vocabulary", "value"])
@pytest.mark.parametrize("heads", HEADS)
def test_every_element_arrives_once_between_any_two_layouts(heads, head):
    draw = random.Random(heads)
    seen = set()
    for number in range(55):
        architecture, source, target, world_size = pair_of(draw, heads, head)
        plan = reshard_plan(architecture, head, source, target, world_size, bucket_bytes=BUCKET)
        validate(plan)
        found = summary(plan, gpus_per_node=8)
        held = holdings(architecture, target, world_size, head)
        wanted = [sum(num_elements(piece.target) for one in rank.values() for piece in one.pieces) for rank in held]
        got = [
            copied + node + far
            for copied, node, far in zip(
                found.copied_bytes, found.received["node"], found.received["network"], strict=True
            )
        ]
        assert got == [4 * count for count in wanted], f"{architecture}: {source} to {target}"
        assert found.peak_extra_bytes <= 2 * BUCKET and found.largest_bucket_bytes <= BUCKET
        seen.add((source, target))
        if number % 18 == 0 and world_size <= 16:
            for (rank, key), parts in elements_written(plan).items():
                total = set().union(*parts)
                assert len(total) == sum(map(len, parts)), f"rank {rank} {key}: an element is written twice"
                assert len(total) == sum(num_elements(piece.target) for piece in held[rank][key].pieces)
    assert len(seen) > 45
