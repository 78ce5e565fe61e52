"""Every test process may import megatron.core: prepared once, one thread, its own world; ranks let go at the end."""

import pytest
import torch

from megarlhf import device
from tests.distributed.pool import close_pools

device.prepare()
torch.set_num_threads(1)


def pytest_ignore_collect(collection_path, config):
    """Tests beside Transformer Engine's Python need a process without the others: they run when they are named."""
    apart = "transformer_engine_cpu"
    if collection_path.name == apart and not any(apart in argument for argument in config.invocation_params.args):
        return True
    return None


@pytest.fixture(scope="session", autouse=True)
def _ranks_are_let_go():
    yield
    close_pools()
    device.leave_world()


@pytest.fixture(scope="session")
def single_rank() -> tuple[int, int]:
    """The test process as a world of one rank: (0, 1)."""
    return device.join_world()


@pytest.fixture
def world(single_rank):
    """The process group of the test process alone; a new one where a test before has left the last."""
    device.join_world()
    return torch.distributed.group.WORLD
