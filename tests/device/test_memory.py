"""What is allocated is counted, at its highest too, and what is freed leaves the process."""

import subprocess
import sys
import time
from pathlib import Path

import torch

from megarlhf import device

SIZE = 2**25


def resident_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_a_tensor_is_counted_while_it_lives():
    before = device.memory_allocated_bytes()
    tensor = torch.ones(SIZE // 4)
    during = device.memory_allocated_bytes() - before
    del tensor
    assert abs(during - SIZE) < SIZE // 50
    assert abs(device.memory_allocated_bytes() - before) < SIZE // 50


def test_the_peak_remembers_what_is_gone_at_the_end():
    before = device.memory_allocated_bytes()
    with device.PeakMeter() as meter:
        tensor = torch.ones(SIZE // 4)
        time.sleep(0.1)
        del tensor
    assert abs(meter.peak_bytes - before - SIZE) < SIZE // 50
    with meter:
        pass
    assert abs(meter.peak_bytes - before) < SIZE // 50, "a meter starts anew"


def bytes_that_leave() -> int:
    """Of 32 blocks of a megabyte that are freed between 32 others."""
    device.prepare()
    device.return_freed_memory()
    blocks = [torch.ones(2**20 // 4) for _ in range(64)]
    before = resident_bytes()
    del blocks[::2]
    return before - resident_bytes()


def test_blocks_of_a_megabyte_leave_the_process_when_they_are_freed():
    """Every other one is freed, so that no end of a heap is free: without mappings of their own they would stay.

    In a process of its own: blocks of many tests lie free in this one, and would be given out again.
    """
    if not device.is_host():
        return
    code = "from tests.device.test_memory import bytes_that_leave; print(bytes_that_leave())"
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) > 30 * 2**20
