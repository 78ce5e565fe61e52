"""A rank as its own process, forked from one that has imported everything; and a hook that ends it at a chosen moment.

Importing this module is what takes long, so the fork server does it once.
"""

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megarlhf import device

torch.set_num_threads(1)
device.prepare()

import megarlhf.loop.keeper  # noqa: E402, F401
import megarlhf.loop.offline  # noqa: E402, F401
import megarlhf.loop.online  # noqa: E402, F401
from megarlhf import cli  # noqa: E402
from megarlhf.telemetry.spans import Spans  # noqa: E402


@dataclass(frozen=True)
class Fault:
    """What happens to some ranks `delay_s` after they enter `stage` for the `time`-th time."""

    stage: str
    time: int
    ranks: tuple[int, ...]
    delay_s: float
    kind: str = "kill"
    """kill: SIGKILL; stop: SIGSTOP (frozen, its connections stay open); raise: an error of the program."""


def rank_process(rank: int, world_size: int, port: int, words: list[str], log: str, fault: Fault | None) -> None:
    """Runs `megarlhf WORDS` as one rank of a launch, and ends as the command does."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if fault is not None and rank in fault.ranks:
        _arm(fault, Path(f"{log}.struck"))
    sys.argv = ["megarlhf", *words]
    cli.run()


def _arm(fault: Fault, struck: Path) -> None:
    entered, plain = [0], Spans.__call__

    def strike() -> None:
        time.sleep(fault.delay_s)
        struck.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    @contextmanager
    def entering(spans: Spans, name: str):
        entered[0] += name == fault.stage
        with plain(spans, name):
            if name == fault.stage and entered[0] == fault.time:
                if fault.kind == "raise":
                    struck.write_text(str(time.time()))
                    raise ArithmeticError(f"a fault in {name}")
                threading.Thread(target=strike, daemon=True).start()
            yield

    Spans.__call__ = entering
