"""The pool itself: ranks are persistent, failures carry tracebacks, and a dead pool is replaced."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import RankFailure, run_on_ranks


def sum_over_ranks(rank: int, world_size: int, offset: int) -> tuple[int, int]:
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    return int(value), os.getpid()


def fail_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank one's own words")
    dist.barrier()


def test_ranks_communicate_and_are_kept():
    first = run_on_ranks(2, sum_over_ranks, 10)
    second = run_on_ranks(2, sum_over_ranks, 20)
    assert [value for value, _ in first] == [21, 21]
    assert [value for value, _ in second] == [41, 41]
    assert [pid for _, pid in first] == [pid for _, pid in second]


def test_a_failing_rank_fails_the_test_with_its_traceback_and_the_pool_recovers():
    with pytest.raises(RankFailure, match="rank one's own words"):
        run_on_ranks(2, fail_on_rank_1)
    assert [value for value, _ in run_on_ranks(2, sum_over_ranks, 0)] == [1, 1]
