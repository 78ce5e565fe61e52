"""Joining the world: alone without a launcher, and told what to do when the environment is half-set."""

import socket

import pytest
import torch.distributed as dist

from megarlhf import device
from megarlhf.device.world import place_in_world
from megarlhf.errors import ConfigError
from tests.distributed.pool import free_port, run_on_ranks

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_joining_twice_is_joining_once(single_rank):
    assert single_rank == (0, 1) == device.join_world()
    assert dist.get_backend() == device.backend()


def test_half_an_environment_is_an_error_that_names_the_launch_command(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    assert place_in_world()[:2] == (0, 1)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(
        ConfigError, match="RANK set but WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing; launch with `torchrun"
    ):
        place_in_world()


def test_a_rank_that_is_no_number_is_an_error(monkeypatch):
    for name, value in zip(LAUNCHER, ("one", "2", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="RANK is 'one', a whole number is needed"):
        place_in_world()
    monkeypatch.setenv("RANK", "1")
    assert place_in_world() == (1, 2, None) and device.launched_world_size() == 2
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match="RANK 2 is none of the WORLD_SIZE 2 ranks"):
        place_in_world()


@pytest.mark.parametrize(
    ("rank", "address", "port", "sentence"),
    [
        (0, "127.0.0.1", "taken", "rank 0 on .* cannot open this port, another program has it; set MASTER_PORT"),
        (0, "127.0.0.1", "free", "not all of the WORLD_SIZE 2 ranks came to rank 0 on .* in 1 s; see that all"),
        (1, "127.0.0.1", "free", "rank 1 on .* got no answer there in 1 s; MASTER_ADDR must be rank 0's machine"),
        (1, "nowhere.invalid", "free", "MASTER_ADDR nowhere.invalid and MASTER_PORT .* got no answer there in 1 s"),
        (1, "127.0.0.1", "port", "MASTER_PORT is 'port', a port is 1 to 65535"),
    ],
    ids=["taken", "alone", "no-answer", "no-such-host", "no-port"],
)
def test_ranks_that_cannot_meet_are_told_which_variable_to_mend(monkeypatch, rank, address, port, sentence):
    with socket.create_server(("", 0)) as server:
        ports = {"taken": str(server.getsockname()[1]), "free": str(free_port())}
        for name, value in zip(LAUNCHER, (rank, 2, address, ports.get(port, port)), strict=True):
            monkeypatch.setenv(name, str(value))
        with pytest.raises(ConfigError, match=sentence):
            device.meet(timeout_s=1)


def place(rank: int, world_size: int) -> tuple[int, int]:
    return device.join_world()


def test_launched_ranks_know_their_place():
    assert run_on_ranks(2, place) == [(0, 2), (1, 2)]
