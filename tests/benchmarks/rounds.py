"""Two sides of one comparison, measured alike: rounds in turn in one process, peak memory each in its own."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median


def in_turn(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side in each of `rounds` rounds, after a round that does not count. Every other round begins with
    the other side, so that neither always runs on what the other left in the caches."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in sorted(sides, reverse=number % 2 == 1):
            start = time.perf_counter()
            sides[name]()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def spread(seconds: Sequence[float]) -> str:
    """Median, and between which times it lies."""
    return f"{median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def peak_bytes() -> int:
    """The largest resident set that this process has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def peaks(module: str, words: Sequence[str], sides: Sequence[str]) -> dict[str, int]:
    """Peak memory of `python -m MODULE WORDS --memory_of SIDE`, which ends by printing it, for each side."""
    found = {}
    for side in sides:
        command = [sys.executable, "-m", module, *words, "--memory_of", side]
        output = subprocess.run(command, capture_output=True, text=True)
        assert output.returncode == 0, f"{' '.join(command)}: {output.stderr[-2000:]}"
        found[side] = int(output.stdout.split()[-1])
    return found
