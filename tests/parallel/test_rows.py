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
    found = gather_rows(mine, [row_of(row, dtype) for row in mine], 7, dist.group.WORLD)
    return [torch.equal(value, row_of(row, dtype)) and value.dtype == dtype for row, value in enumerate(found)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_ragged_rows_arrive_bit_for_bit_on_every_rank(dtype):
    assert run_on_ranks(2, gather_on_rank, dtype) == [[True] * 7] * 2


def idle_rank(rank: int, world_size: int):
    import torch.distributed as dist

    rows = [0, 1] if rank == 0 else []
    return [value.tolist() for value in gather_rows(rows, [torch.tensor([row]) for row in rows], 2, dist.group.WORLD)]


def test_a_rank_may_have_no_rows():
    assert run_on_ranks(2, idle_rank) == [[[0], [1]]] * 2


def complaint(rank: int, world_size: int, rows_of_ranks) -> str:
    import torch.distributed as dist

    rows = rows_of_ranks[rank]
    try:
        gather_rows(rows, [torch.ones(2)] * len(rows), 3, dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "rows, words",
    [
        (([0], [1]), "missing [2]"),
        (([0, 1], [1, 2]), "contributed twice [1]"),
        (([0, 1], [2, 3]), "out of range [3]"),
    ],
)
def test_a_row_missing_or_doubled_is_an_error_on_every_rank(rows, words):
    answers = run_on_ranks(2, complaint, rows)
    assert len(set(answers)) == 1 and words in answers[0]


def test_nothing_gathers_to_nothing(world):
    assert gather_rows([], [], 0, world) == []
