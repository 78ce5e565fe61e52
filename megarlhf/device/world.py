"""Joining and leaving torch.distributed: from a launcher's environment, or a world of one without a launcher."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megarlhf.device.setup import backend, current, has_gpu
from megarlhf.errors import ConfigError
from megarlhf.launcher import LAUNCH, is_launched, place


def meet(timeout_s: float = 600) -> tuple[int, int, dist.Store]:
    """(rank, world size, the store of all launched ranks), before any of them touches a device. Collective.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them; with neither RANK nor WORLD_SIZE set,
    the world is this process alone. Raises ConfigError: only some are set; the port is taken or no port; the first
    rank cannot be reached, or ranks are missing, within `timeout_s`.
    """
    rank, world_size, store = place_in_world()
    if store is not None:
        return rank, world_size, store
    place = " and ".join(f"{name} {os.environ[name]}" for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not os.environ["MASTER_PORT"].isdigit() or not 0 < int(os.environ["MASTER_PORT"]) < 2**16:
        raise ConfigError(f"environment: MASTER_PORT is {os.environ['MASTER_PORT']!r}, a port is 1 to 65535; {LAUNCH}")
    try:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout_s)))
    except dist.DistError as problem:
        raise ConfigError(_why_not_met(str(problem), place, rank, world_size, timeout_s)) from problem
    return rank, world_size, store


def _why_not_met(problem: str, place: str, rank: int, world_size: int, timeout_s: float) -> str:
    here = f"rank {rank} on {socket.gethostname()}"
    if "EADDRINUSE" in problem:
        return (
            f"environment: {place}: {here} cannot open this port, another program has it; set MASTER_PORT to a free "
            "one, or let torchrun choose one with --standalone (one machine) or --rdzv-endpoint HOST:PORT"
        )
    if "waiting for clients" in problem:
        return (
            f"environment: {place}: not all of the WORLD_SIZE {world_size} ranks came to {here} in {timeout_s:g} s; "
            "see that all were started, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"
        )
    return (
        f"environment: {place}: {here} got no answer there in {timeout_s:g} s; MASTER_ADDR must be rank 0's machine by "
        "a name that all others know, and MASTER_PORT a port that its firewall lets through"
    )


def join_world(timeout_s: float = 600, store: dist.Store | None = None) -> tuple[int, int]:
    """Join the process group of all ranks (collective over the world); returns (rank, world size). Idempotent.

    `store`: where the ranks have met, when they have. Raises ConfigError as `meet` does.
    """
    if not dist.is_initialized():
        rank, world_size, store = meet(timeout_s) if store is None else (*place(), store)
        device = {"device_id": current()} if has_gpu() else {}
        dist.init_process_group(
            backend(), rank=rank, world_size=world_size, store=store, timeout=timedelta(seconds=timeout_s), **device
        )
    return dist.get_rank(), dist.get_world_size()


def launched_world_size() -> int:
    """Ranks that the launcher started, without joining them; 1 without one. Raises ConfigError as `join_world` does."""
    return place()[1]


def is_first_rank() -> bool:
    """This process speaks for all launched ones."""
    return place()[0] == 0


class Worlds:
    """Worlds of the first 1, 2, 3... of the launched ranks, one after the other."""

    def __init__(self, timeout_s: float = 3600):
        """`timeout_s` bounds every collective, and how long a rank waits until its next world begins."""
        self.rank, self.size, self._store = meet(timeout_s)
        self._timeout = timedelta(seconds=timeout_s)
        self._count = 0

    @contextmanager
    def of(self, num_ranks: int) -> Iterator[bool]:
        """Inside the block ranks 0 to `num_ranks` - 1 are the world, and are given true (collective over them).

        Every launched rank asks for the same worlds in the same order. A failure leaves the world as it is.
        """
        self._count += 1
        is_in = self.rank < num_ranks
        if is_in:
            store = dist.PrefixStore(f"world{self._count}", self._store)
            device = {"device_id": current()} if has_gpu() else {}
            dist.init_process_group(
                backend(), rank=self.rank, world_size=num_ranks, store=store, timeout=self._timeout, **device
            )
        yield is_in
        leave_world()


def leave_world() -> None:
    """Leave the process group of all ranks, if it was joined, when all are about to. Collective over the world."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def side_store() -> dist.Store:
    """A connection of its own to the launcher's store, once the world is joined: for words between ranks that may not
    wait for a collective. Without a launcher, a store that only this process sees."""
    if "RANK" not in os.environ:
        return dist.HashStore()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
    return dist.PrefixStore(f"megarlhf/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def place_in_world() -> tuple[int, int, dist.Store | None]:
    """(rank, world size, store) from the environment; a store of its own for a single process, so no port is opened."""
    rank, world_size = place()
    return rank, world_size, None if is_launched() else dist.HashStore()
