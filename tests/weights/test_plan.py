"""Reshard plans for hundreds of pairs of layouts, carried out on numbered elements in one process."""

from itertools import product

import pytest
import torch

from megarlhf.config.layout import Layout
from megarlhf.errors import LayoutError
from megarlhf.models.architecture import Architecture, layout_violations
from megarlhf.weights.boxes import slices
from megarlhf.weights.plan import holdings, reshard_plan, validate
from megarlhf.weights.transfers import ReshardPlan
from tests.tiny import tiny_config

LAYOUTS = [
    Layout(tp=tp, pp=pp, vp=vp)
    for tp, pp, vp in product((1, 2, 4, 8), (1, 2, 3, 4, 8), (1, 2))
    if (vp == 1 or 1 < pp < 5) and tp * pp <= 16
]
VARIANTS = {
    "untied": ({}, "vocabulary"),
    "tied": ({"tied": True}, "vocabulary"),
    "value": ({"num_labels": 1}, "value"),
}


def architecture_of(**fields) -> Architecture:
    sizes = {"hidden_size": 6, "intermediate_size": 16, "num_hidden_layers": 9, "num_attention_heads": 8, "head_dim": 4}
    return Architecture.from_hf(tiny_config(**{**sizes, "num_key_value_heads": 2, "vocab_size": 13, **fields}))


def world_of(source: Layout, target: Layout) -> int:
    """The smallest world that holds whole copies of both."""
    one, other = source.model_ranks, target.model_ranks
    return next(size for size in range(max(one, other), one * other + 1) if size % one == 0 and size % other == 0)


def tensors(architecture: Architecture, layout: Layout, world: int, head: str, numbered: dict) -> list[dict]:
    """What each rank holds when element i of all Hugging Face tensors together is the number i; padding is -1."""
    made: dict[int, dict] = {}
    held = holdings(architecture, layout, world, head)
    for holding in held:
        if id(holding) not in made:
            made[id(holding)] = {key: _filled(tensor, numbered) for key, tensor in holding.items()}
    return [made[id(holding)] for holding in held]


def _filled(tensor, numbered: dict) -> torch.Tensor:
    values = torch.full(tensor.shape, -1, dtype=torch.int32)
    for piece in tensor.pieces:
        values[slices(piece.target)] = numbered[piece.hf_name][slices(piece.source)]
    return values


def number(architecture: Architecture, head: str) -> dict[str, torch.Tensor]:
    from megarlhf.weights.local_map import hf_shapes

    numbered, start = {}, 0
    for name, shape in hf_shapes(architecture, head).items():
        count = int(torch.tensor(shape).prod())
        numbered[name] = torch.arange(start, start + count, dtype=torch.int32).view(shape)
        start += count
    return numbered


def carried_out(plan: ReshardPlan, held: list[dict]) -> list[dict]:
    """The target tensors after the plan, element by element, on all ranks at once; what is not written stays -1."""
    moved = [
        {key: torch.full(tensor.shape, -1, dtype=torch.int32) for key, tensor in one.items()} for one in plan.target
    ]
    transfers = [*plan.copies, *(transfer for message in plan.messages for transfer in message.transfers)]
    for one in transfers:
        values = held[one.source_rank][one.source][slices(one.source_box)]
        moved[one.target_rank][one.target][slices(one.target_box)] = values
    return moved


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_every_element_arrives_once_and_in_its_place_for_all_pairs_of_layouts(variant, groups):
    fields, head = VARIANTS[variant]
    architecture = architecture_of(num_key_value_heads=groups, **fields)
    numbered = number(architecture, head)
    fitting = [layout for layout in LAYOUTS if not layout_violations(architecture, layout, "layout")]
    pairs = [(a, b) for a, b in product(fitting, fitting) if world_of(a, b) <= 16]
    chosen = pairs[:: len(pairs) // 36][:36]
    assert len(chosen) == 36
    for source, target in chosen:
        world = world_of(source, target)
        plan = reshard_plan(architecture, head, source, target, world, bucket_bytes=1024)
        validate(plan)
        moved = carried_out(plan, tensors(architecture, source, world, head, numbered))
        for mine, theirs in zip(moved, tensors(architecture, target, world, head, numbered), strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[key], theirs[key]) for key in mine), f"{source} -> {target}"


def test_nothing_is_sent_between_equal_layouts():
    plan = reshard_plan(architecture_of(), "vocabulary", Layout(tp=2, pp=2), Layout(tp=2, pp=2), 8)
    assert plan.messages == () and plan.bytes_moved == 0 and plan.peak_extra_bytes == 0


def test_a_rank_receives_only_what_it_lacks():
    architecture = architecture_of()
    plan = reshard_plan(architecture, "vocabulary", Layout(tp=2), Layout(), 2)
    held = sum(tensor.numel() for tensor in number(architecture, "vocabulary").values())
    norms = (2 * architecture.num_layers + 1) * architecture.hidden_size
    embeddings = 2 * architecture.vocab_size * architecture.hidden_size
    halves = (held - norms - embeddings) // 2
    first, second = (2 * rows * architecture.hidden_size for rows in (7, 6))
    assert plan.bytes_received == (4 * (halves + second), 4 * (halves + first))
    assert plan.bytes_sent == tuple(reversed(plan.bytes_received))


def test_replicas_share_the_sending():
    plan = reshard_plan(architecture_of(), "vocabulary", Layout(tp=2), Layout(pp=8), 8)
    # A norm is the only tensor that a target may hold already; whoever needs the rest asks the four replicas in turn.
    assert max(plan.bytes_sent) < 1.5 * sum(plan.bytes_sent) / 8


def test_buckets_bound_what_a_rank_sends_and_receives_together():
    architecture = architecture_of(vocab_size=997)
    plans = [
        reshard_plan(architecture, "vocabulary", Layout(tp=2), Layout(pp=2), 4, bucket) for bucket in (1024, 2**30)
    ]
    for plan in plans:
        validate(plan)
    assert plans[0].bytes_moved == plans[1].bytes_moved
    assert 768 < plans[0].peak_extra_bytes <= 1024
    assert len(plans[1].buckets) == 1


def test_stages_send_side_by_side():
    """With room for one transfer at a time, buckets still hold messages of several senders."""
    plan = reshard_plan(architecture_of(), "vocabulary", Layout(pp=4), Layout(tp=4), 4, bucket_bytes=512)
    senders = [len({message.source_rank for message in bucket}) for bucket in plan.buckets]
    assert sum(senders) / len(senders) > 2


def test_half_precision_halves_the_bytes_but_for_the_value_head():
    plans = [
        reshard_plan(architecture_of(num_labels=1), "value", Layout(), Layout(pp=2), 2, dtype=dtype)
        for dtype in ("float32", "bfloat16")
    ]
    assert [plan.bytes_moved for plan in plans] == [0, 0]
    full, half = (
        reshard_plan(architecture_of(num_labels=1), "value", Layout(pp=2), Layout(), 2, dtype=dtype).bytes_moved
        for dtype in ("float32", "bfloat16")
    )
    head_bytes = 4 * architecture_of().hidden_size
    assert half - head_bytes == (full - head_bytes) // 2


def test_a_layout_that_does_not_divide_the_world_is_refused():
    with pytest.raises(LayoutError, match="launch a multiple of 2"):
        reshard_plan(architecture_of(), "vocabulary", Layout(tp=2), Layout(), 3)


def test_a_plan_with_a_hole_or_a_double_is_found_out():
    plan = reshard_plan(architecture_of(), "vocabulary", Layout(tp=2), Layout(), 2)
    holed = ReshardPlan(plan.source, plan.target, plan.copies[1:], plan.buckets, plan.bucket_bytes)
    doubled = ReshardPlan(plan.source, plan.target, plan.copies + plan.copies[:1], plan.buckets, plan.bucket_bytes)
    with pytest.raises(AssertionError, match="never written"):
        validate(holed)
    with pytest.raises(AssertionError, match="both written"):
        validate(doubled)


def test_a_70b_models_plan_is_balanced_and_bounded():
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    config = tiny_config(num_key_value_heads=8, head_dim=128, vocab_size=128256, **sizes)
    plan = reshard_plan(
        Architecture.from_hf(config), "vocabulary", Layout(tp=8, pp=4), Layout(tp=8), 32, dtype="bfloat16"
    )
    validate(plan)
    share = 2 * 70.6e9 / 8
    assert all(abs(received / (share * 3 / 4) - 1) < 0.05 for received in plan.bytes_received)
    assert max(plan.bytes_sent) < 1.1 * max(plan.bytes_received)
    assert plan.peak_extra_bytes <= plan.bucket_bytes == 64 * 2**20
    # Buckets are full: few more than the busiest rank needs.
    busiest = max(sent + received for sent, received in zip(plan.bytes_sent, plan.bytes_received, strict=True))
    assert len(plan.buckets) < 1.15 * busiest / plan.bucket_bytes
