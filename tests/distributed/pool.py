"""Ranks for tests: `run_on_ranks(n, function, *args)` runs a module-level function on n gloo processes.

The processes are started on first use, one pool for each world size, and kept until the end of the session: starting
them costs seconds, running something on them milliseconds. Functions travel by reference (module and name), arguments
and results by pickle.
"""

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

TIMEOUT_S = 180
GRACE_S = 5
"""How long the other ranks may still run once one has failed: they often wait for it in a collective."""

_pools: dict[int, "Pool"] = {}


class RankFailure(AssertionError):
    """A function failed, died or hung on some ranks; the message holds every rank's traceback."""


def run_on_ranks(world_size: int, function: Callable, *args) -> list:
    """Run `function(rank, world_size, *args)` on every rank of a world of gloo processes; results in rank order.

    Raises RankFailure with the tracebacks of all ranks when one raises, dies or takes longer than 180 s; the pool is
    then torn down, and the next call starts a new one.
    """
    if world_size not in _pools:
        _pools[world_size] = Pool(world_size)
    try:
        return _pools[world_size].run(function, args)
    except BaseException:
        _pools.pop(world_size).kill()
        raise


def close_pools() -> None:
    """Let all worker processes go (end of the session)."""
    for world_size in list(_pools):
        _pools.pop(world_size).close()


class Pool:
    """`world_size` processes that have joined one gloo world and wait for functions to run."""

    def __init__(self, world_size: int):
        context = multiprocessing.get_context("spawn")
        self.world_size = world_size
        self.connections: list[Connection] = []
        self.processes = []
        self.stacks = [Path(tempfile.mkstemp(prefix=f"rank{rank}_", suffix=".txt")[1]) for rank in range(world_size)]
        port = free_port()
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, world_size, port, theirs, self.stacks[rank])
            process = context.Process(target=serve, args=arguments, name=f"rank{rank}of{world_size}")
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before

    def run(self, function: Callable, args: tuple) -> list:
        message = pickle.dumps((function.__module__, function.__qualname__, args))
        for rank, connection in enumerate(self.connections):
            try:
                connection.send_bytes(message)
            except OSError as error:
                raise RankFailure(f"rank {rank} died before {function.__qualname__} was sent to it") from error
        answers = self.collect()
        failures = {rank: text for rank, (is_done, text) in answers.items() if not is_done}
        if failures:
            report = "\n".join(f"--- rank {rank} of {self.world_size}\n{failures[rank]}" for rank in sorted(failures))
            raise RankFailure(f"{function.__qualname__} failed on ranks {sorted(failures)}\n{report}")
        return [answers[rank][1] for rank in range(self.world_size)]

    def collect(self) -> dict[int, tuple[bool, object]]:
        """{rank: (True, result) or (False, traceback)}; waits until all have answered or time is up."""
        answers: dict[int, tuple[bool, object]] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(answers) < self.world_size:
            open_ranks = {self.connections[rank]: rank for rank in range(self.world_size) if rank not in answers}
            ready = wait(list(open_ranks), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in open_ranks.values():
                    answers[rank] = (False, f"no answer in time; it was at\n{self.stack(rank)}")
            for connection in ready:
                rank = open_ranks[connection]
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    self.processes[rank].join(1)
                    answers[rank] = (False, f"process died with exit code {self.processes[rank].exitcode}")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def stack(self, rank: int) -> str:
        """Where a rank is right now, all threads."""
        if self.processes[rank].is_alive():
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.5)
        return self.stacks[rank].read_text()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(10)
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        for connection in self.connections:
            connection.close()
        for stack in self.stacks:
            stack.unlink(missing_ok=True)


def serve(rank: int, world_size: int, port: int, connection: Connection, stack: Path) -> None:
    """A worker's life: join the world, then run what is sent until the connection closes."""
    file = stack.open("w")
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started: str | None = None
    try:
        join(TIMEOUT_S)
    except BaseException:
        started = traceback.format_exc()
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer = (False, started) if started else (True, call(rank, world_size, message))
            reply = pickle.dumps(answer)
        except BaseException:
            reply = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(reply)


def join(timeout_s: float) -> None:
    """Prepare this process for megatron-core and join the world (collective)."""
    import torch

    from megarlhf import device

    torch.set_num_threads(1)
    device.prepare()
    device.join_world(timeout_s)


def call(rank: int, world_size: int, message: bytes):
    module, name, args = pickle.loads(message)
    return getattr(importlib.import_module(module), name)(rank, world_size, *args)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
