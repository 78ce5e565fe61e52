"""Ranks meet in shared memory; one that has ended, or does not come, is an error that names it."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from megarlhf.loop.watch import is_consequence
from megarlhf.parallel.meeting import Meeting, has_ended, process


def corners(num_ranks: int) -> list[torch.Tensor]:
    """Memory that all ranks of a test share: this process's."""
    return [torch.zeros(Meeting.num_bytes(num_ranks), dtype=torch.uint8) for _ in range(num_ranks)]


def test_nobody_goes_on_before_all_have_come():
    shared, turns, seen = corners(3), [0, 0, 0], []
    meetings = [Meeting(rank, shared) for rank in range(3)]

    def walk(rank: int) -> None:
        for turn in range(200):
            turns[rank] = turn
            meetings[rank].wait()
            seen.append(min(turns) >= turn)
            meetings[rank].wait()

    threads = [threading.Thread(target=walk, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [True] * 600


def test_a_rank_that_does_not_come_is_an_error_after_the_time_given():
    shared = corners(2)
    Meeting(1, shared)
    with pytest.raises(RuntimeError, match=rf"rank 1 of the group \(process {os.getpid()}\) did not come in") as told:
        Meeting(0, shared, timeout_s=0.5).wait()
    assert is_consequence(told.value), "the run asks who is the cause"


def test_a_rank_whose_process_has_ended_is_an_error_at_once():
    shared = corners(2)
    meeting = Meeting(0, shared)
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.DEVNULL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, but its parent has not asked
    process(shared[1]).value = child.pid
    assert has_ended(child.pid) and not has_ended(os.getpid())
    with pytest.raises(RuntimeError, match=rf"rank 1 of the group \(process {child.pid}\) has ended") as told:
        meeting.wait()
    assert is_consequence(told.value)
    child.wait()
    assert has_ended(child.pid)
