"""Processes that write units, one at a time each; the parent hands them out and reads ahead for them.

They are started from a clean process (never forked from this one, which may have threads), and end with this one.
"""

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from megarlhf.errors import ConversionError
from megarlhf.weights.heap import give_back_freed_memory
from megarlhf.weights.units import Tensors, Unit, prefetch, write_unit

_CONTEXT = multiprocessing.get_context("forkserver")
_PATIENCE_S = 10
Done = Callable[[Unit, int], None]
"""Called here for every unit that is written, with its CRC-32."""


def write_units(units: Sequence[Unit], tensors: Tensors, folder: Path, workers: int, done: Done) -> None:
    """Write all units into files that are there already; with one worker in this process.

    Raises what a worker raised (CheckpointError, OSError), or ConversionError when one was killed.
    """
    num_processes = min(workers, len(units))
    if num_processes > 1:
        _write_in_processes(units, tensors, folder, num_processes, done)
        return
    for place, unit in enumerate(units):
        for following in units[place + 1 : place + 2]:
            prefetch(following, tensors)
        done(unit, write_unit(unit, tensors, folder))


def _write_in_processes(units: Sequence[Unit], tensors: Tensors, folder: Path, count: int, done: Done) -> None:
    _CONTEXT.set_forkserver_preload(["megarlhf.weights.convert"])
    processes: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(count):
            here, there = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(there, tensors, folder), daemon=True)
            process.start()
            there.close()  # so that its end is seen here
            processes[here] = process
        _hand_out(units, tensors, processes, done)
        for connection in processes:
            connection.send(None)
    except BaseException:
        for started in processes.values():
            started.terminate()
        raise
    finally:
        for connection, started in processes.items():
            started.join(_PATIENCE_S)
            connection.close()


def _hand_out(units: Sequence[Unit], tensors: Tensors, processes: dict[Connection, BaseProcess], done: Done) -> None:
    """Give every worker a unit, and another one as often as it is ready."""
    ahead = len(processes)
    busy: dict[Connection, Unit] = {}
    idle, place = list(processes), 0
    while place < len(units) or busy:
        while idle and place < len(units):
            connection = idle.pop()
            connection.send(units[place])
            busy[connection] = units[place]
            for following in units[place + ahead : place + ahead + 1]:
                prefetch(following, tensors)
            place += 1
        for connection in (connection for connection in wait(list(busy)) if isinstance(connection, Connection)):
            unit = busy.pop(connection)
            done(unit, _answer(connection, processes[connection], unit))
            idle.append(connection)


def _answer(connection: Connection, process: BaseProcess, unit: Unit) -> int:
    try:
        answer = connection.recv()
    except EOFError as problem:
        process.join(_PATIENCE_S)
        raise ConversionError(
            f"{unit.file}: the process that wrote it ended with code {process.exitcode} (-9: killed, as for want of "
            "memory); run the same command again, with fewer --workers"
        ) from problem
    if isinstance(answer, Exception):
        raise answer
    return answer


def _serve(connection: Connection, tensors: Tensors, folder: Path) -> None:
    """A worker's life: units come in, checksums or errors go out, until there is no more or nobody asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    torch.set_num_threads(1)
    give_back_freed_memory()
    while True:
        try:
            unit = connection.recv()
        except (EOFError, ConnectionResetError):  # the parent is gone
            return
        if unit is None:
            return
        answer: int | Exception
        try:
            answer = write_unit(unit, tensors, folder)
        except Exception as error:
            answer = error
        try:
            connection.send(answer)
        except BrokenPipeError:
            return
