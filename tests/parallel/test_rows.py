"""Rows are shared out once each, evenly, and come back bit for bit whatever their length."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from megarlhf.parallel.rows import gather_rows, share
from tests.distributed.pool import run_on_ranks


@settings(max_examples=100, deadline=None)
@given(some.lists(some.integers(1, 500), max_size=40), some.integers(1, 6))
def test_every_row_has_one_rank_and_no_rank_carries_more_than_a_row_above_the_mean(lengths, dp):
    shares = share(lengths, dp)
    assert sorted(row for rows in shares for row in rows) == list(range(len(lengths)))
    loads = [sum(lengths[row] for row in rows) for rows in shares]
    assert max(loads) <= sum(lengths) / dp + max(lengths, default=0)
    assert shares == share(lengths, dp)


def test_equal_rows_are_shared_equally():
    assert share([7] * 6, 3) == [[0, 3], [1, 4], [2, 5]]


def row_of(row: int, dtype: torch.dtype) -> torch.Tensor:
    """Row r has (3 r) mod 5 elements: one of them has none."""
    values = torch.randn((3 * row) % 5, generator=torch.Generator().manual_seed(row)) * 100
    return values.to(dtype)


def gather_on_rank(rank: int, world_size: int, dtype: torch.dtype):
    import torch.distributed as dist

    mine = [[4, 0, 5], [3, 1, 2, 6]][rank]
    values = [row_of(row, dtype) for row in mine]
    found, lengths = gather_rows(mine, [len(one) for one in values], torch.cat(values), 7, dist.group.WORLD)
    expected = [row_of(row, dtype) for row in range(7)]
    return (
        torch.equal(found, torch.cat(expected))
        and found.dtype == dtype
        and lengths.tolist() == list(map(len, expected))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_ragged_rows_arrive_bit_for_bit_on_every_rank(dtype):
    assert run_on_ranks(2, gather_on_rank, dtype) == [True] * 2


def rows_of_one_length(rank: int, world_size: int, length: int):
    import torch.distributed as dist

    rows = [[2, 0], [1]][rank]
    values = torch.tensor(rows).repeat_interleave(length)
    found, lengths = gather_rows(rows, [length] * len(rows), values, 3, dist.group.WORLD)
    return found.tolist(), lengths.tolist()


@pytest.mark.parametrize("length", [0, 1, 3])
def test_rows_of_one_length_come_in_order_too(length):
    expected = [row for row in range(3) for _ in range(length)]
    assert run_on_ranks(2, rows_of_one_length, length) == [(expected, [length] * 3)] * 2


def idle_rank(rank: int, world_size: int):
    import torch.distributed as dist

    rows = [0, 1] if rank == 0 else []
    found, lengths = gather_rows(rows, [1] * len(rows), torch.tensor(rows, dtype=torch.int64), 2, dist.group.WORLD)
    return found.tolist(), lengths.tolist()


def test_a_rank_may_have_no_rows():
    assert run_on_ranks(2, idle_rank) == [([0, 1], [1, 1])] * 2


DTYPES = ([0, 2], [1])
"""Rows of ranks whose values are of different dtypes."""


def complaint(rank: int, world_size: int, rows_of_ranks) -> str:
    import torch.distributed as dist

    rows = rows_of_ranks[rank]
    try:
        dtype = torch.int32 if rows_of_ranks == DTYPES and rank else torch.float32
        gather_rows(rows, [2] * len(rows), torch.ones(2 * len(rows), dtype=dtype), 3, dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "rows, words",
    [
        (([0], [1]), "missing [2]"),
        (([0, 1], [1, 2]), "contributed twice [1]"),
        (([0, 1], [2, 3]), "out of range [3]"),
        (DTYPES, "several dtypes: ['torch.float32', 'torch.int32']"),
    ],
)
def test_a_row_missing_or_doubled_is_an_error_on_every_rank(rows, words):
    answers = run_on_ranks(2, complaint, rows)
    assert len(set(answers)) == 1 and words in answers[0]


def test_nothing_gathers_to_nothing(world):
    found, lengths = gather_rows([], [], torch.zeros(0), 0, world)
    assert found.tolist() == lengths.tolist() == []


def slow_share(lengths: list[int], dp: int) -> list[list[int]]:
    loads, rows = [(0, 0)] * dp, [[] for _ in range(dp)]
    for row in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        rank = min(range(dp), key=lambda index: (*loads[index], index))
        loads[rank] = (loads[rank][0] + lengths[row], loads[rank][1] + 1)
        rows[rank].append(row)
    return [sorted(mine) for mine in rows]


@settings(max_examples=50, deadline=None)
@given(some.lists(some.integers(0, 9), max_size=30), some.integers(1, 6))
def test_ranks_are_chosen_as_by_looking_at_all_of_them(lengths, dp):
    assert share(lengths, dp) == slow_share(lengths, dp)
