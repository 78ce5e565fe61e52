"""Starting the ranks of a command on this machine, where it needs several and no launcher started them."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

_GRACE_S = 5
"""How long the other ranks may still run once one has failed: the first rank is often about to say why."""


def run_local_ranks(num_ranks: int, words: Sequence[str]) -> int:
    """Run `megarlhf WORDS` as `num_ranks` processes of this machine; returns the exit code of the first that failed.

    They find each other as under torchrun, and share this process's output. When one fails the others are ended.
    """
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks))),
    }
    command = [sys.executable, "-m", "megarlhf", *words]
    ranks = [
        subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num_ranks)
    ]
    try:
        return _wait(ranks)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()


def _wait(ranks: list[subprocess.Popen]) -> int:
    """0 once all have ended well, else the code of the lowest rank that failed."""
    deadline = float("inf")
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        failed = any(process.poll() for process in ranks)
        if failed:
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        time.sleep(0.05)
    codes = [process.poll() for process in ranks]
    return next((code for code in codes if code), 0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
