"""Parts are summed in the order of the ranks, bit for bit, and gathered byte for byte, by boxes and by messages."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import RankFailure, run_on_ranks

SMALL_BYTES = 3 * 256
"""So that a few kilobytes take many turns, the last one not full."""


def post(kind: str):
    """How pieces travel in a test: turns of SMALL_BYTES, or the real one."""
    from megarlhf.parallel.meeting import Meeting
    from megarlhf.parallel.parts import Boxes, Messages, open_post
    from megarlhf.parallel.shared_memory import open_boxes

    group = dist.group.WORLD
    if kind == "real":
        return open_post(group)
    if kind == "messages":
        return Messages(group, SMALL_BYTES)
    return Boxes(group, open_boxes(group, 2 * SMALL_BYTES + Meeting.num_bytes(group.size())), SMALL_BYTES)


def buffer_of(rank: int, number: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank holds before it is summed: magnitudes so far apart that another order gives other bits."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    values = torch.randn(numel, generator=generator) * 10 ** (6 * torch.rand(numel, generator=generator) - 3)
    return values.to(dtype)


def summed(rank: int, world_size: int, kind: str, part_elements: int, dtype: torch.dtype):
    """(buffer after `sum_parts`, after `gather_parts`), for three buffers one after the other."""
    from megarlhf.parallel.parts import gather_parts, sum_parts

    carrier, found = post(kind), []
    for number in range(3):
        buffer = buffer_of(rank, number, world_size * part_elements, dtype)
        if rank == number % world_size:
            time.sleep(0.02)  # a rank that comes late changes no bit
        sum_parts(buffer, carrier)
        reduced = buffer.clone()
        gather_parts(buffer, carrier)
        found.append((reduced, buffer))
    return type(carrier).__name__, found


@pytest.mark.parametrize("kind", ["boxes", "messages", "real"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("part_elements", [1, 1001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_part_is_the_sum_in_the_order_of_the_ranks(kind, world_size, part_elements, dtype):
    answers = run_on_ranks(world_size, summed, kind, part_elements, dtype)
    for number in range(3):
        before = [buffer_of(rank, number, world_size * part_elements, dtype) for rank in range(world_size)]
        total = before[0].float()
        for term in before[1:]:
            total = total + term.float()
        total = total.to(dtype)
        for rank, (name, found) in enumerate(answers):
            assert name == ("Messages" if kind == "messages" else "Boxes")
            reduced, gathered = found[number]
            mine = slice(rank * part_elements, (rank + 1) * part_elements)
            expected = before[rank].clone()
            expected[mine] = total[mine]
            assert torch.equal(reduced, expected), "other parts stay as they were"
            assert torch.equal(gathered, total)


def large(rank: int, world_size: int, kind: str):
    """A sum of many full turns, several times: whether each is right, and how far this process's memory grew, MiB."""
    from megarlhf.parallel.parts import gather_parts, sum_parts

    carrier = post(kind)
    buffer = torch.zeros(world_size * 3_000_001)
    terms = [torch.randn(len(buffer), generator=torch.Generator().manual_seed(other)) for other in range(world_size)]
    total = sum(terms[1:], terms[0])
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before, right = _memory_mib("VmHWM"), []
    for _ in range(3):
        buffer.copy_(terms[rank])
        sum_parts(buffer, carrier)
        gather_parts(buffer, carrier)
        right.append(torch.equal(buffer, total))
    return right, _memory_mib("VmHWM") - before


def _memory_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) / 2**10


@pytest.mark.parametrize("world_size", [2, 4])
def test_beside_the_buffer_only_the_boxes_are_held(world_size):
    for right, grown_mib in run_on_ranks(world_size, large, "real"):
        assert right == [True] * 3
        assert grown_mib < 4 * world_size + 8, "two halves of 2 MiB a rank, and the terms of one turn"


def one_dies_while_the_other_waits(rank: int, world_size: int):
    """The second piece of rank 1 never comes."""
    carrier = post("boxes")
    carrier.start()
    piece = torch.zeros(8)
    carrier.share(piece)
    if rank == 1:
        os._exit(3)
    carrier.share(piece)


def test_a_rank_that_ends_is_named_and_nobody_waits_for_it():
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 of the group \(process \d+\) has ended"):
        run_on_ranks(2, one_dies_while_the_other_waits)
    assert time.monotonic() - start < 30


def carried(rank: int, world_size: int, part_elements: int, dtype: torch.dtype):
    """torch's collectives over a group of its own whose sums and gathers are carried."""
    from megarlhf.parallel.parts import carry

    group = dist.new_group(list(range(world_size)))
    carry(group)
    before = buffer_of(rank, 0, world_size * part_elements, dtype)
    whole, columns = before.clone(), before.clone().view(world_size, -1).t()
    dist.all_reduce(whole, group=group)
    dist.all_reduce(columns, group=group, async_op=True).wait()
    part, gathered = torch.empty(part_elements, dtype=dtype), torch.empty_like(before)
    dist.reduce_scatter_tensor(part, before, group=group)
    dist.all_gather_into_tensor(gathered, part, group=group)
    counted = torch.full((3,), rank)
    dist.all_reduce(counted, group=group)
    highest = torch.full((3,), float(rank))
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return whole, columns.t().reshape(-1), gathered, counted.tolist(), highest.tolist()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("part_elements", "dtype"), [(1, torch.float32), (300_001, torch.float32), (77, torch.bfloat16)]
)
def test_carried_collectives_have_the_same_bits_as_the_sum_in_order(world_size, part_elements, dtype):
    before = [buffer_of(rank, 0, world_size * part_elements, dtype).float() for rank in range(world_size)]
    total = sum(before[1:], before[0]).to(dtype)
    for whole, columns, gathered, counted, highest in run_on_ranks(world_size, carried, part_elements, dtype):
        assert torch.equal(whole, total) and torch.equal(columns, total) and torch.equal(gathered, total)
        assert counted == [sum(range(world_size))] * 3 and highest == [world_size - 1.0] * 3


def where_there_is_no_room(rank: int, world_size: int):
    """How pieces travel where no box can be had, and what a sum is then."""
    from unittest.mock import patch

    from megarlhf.parallel import parts

    with patch.object(parts, "open_boxes", return_value=None):
        carrier = parts.open_post.__wrapped__(dist.group.WORLD)
    buffer = torch.arange(2.0 * world_size) + rank
    parts.sum_parts(buffer, carrier)
    return type(carrier).__name__, buffer.tolist()


def test_without_shared_memory_messages_carry_the_pieces():
    assert run_on_ranks(2, where_there_is_no_room) == [
        ("Messages", [1.0, 3.0, 2.0, 3.0]),
        ("Messages", [1.0, 2.0, 5.0, 7.0]),
    ]
