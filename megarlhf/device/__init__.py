"""The only room that knows cuda from cpu: device and backend, memory, and what lets megatron-core run without a GPU.

`prepare()` comes before the first import of megatron.core, in every process that uses it.
"""

from megarlhf.device.arithmetic import add_matmul_, block_bytes, linear, linear_float32
from megarlhf.device.carried import carry
from megarlhf.device.labels import labelled
from megarlhf.device.local import run_local_ranks
from megarlhf.device.megatron import best_adam, gradients_for_norm, using_adam
from megarlhf.device.memory import (
    PeakMeter,
    beside_computation,
    copies_are_next,
    empty_cache,
    is_host,
    memory_allocated_bytes,
    pinned,
    pinned_empty,
    return_freed_memory,
    synchronize,
    wait_for_copies,
)
from megarlhf.device.setup import backend, current, is_prepared, prepare
from megarlhf.device.world import (
    Worlds,
    is_first_rank,
    join_world,
    launched_world_size,
    leave_world,
    meet,
    side_store,
)
from megarlhf.launcher import is_launched

__all__ = [
    "Worlds",
    "PeakMeter",
    "add_matmul_",
    "backend",
    "beside_computation",
    "block_bytes",
    "best_adam",
    "carry",
    "copies_are_next",
    "current",
    "empty_cache",
    "gradients_for_norm",
    "is_first_rank",
    "is_launched",
    "is_host",
    "is_prepared",
    "join_world",
    "labelled",
    "linear",
    "linear_float32",
    "launched_world_size",
    "leave_world",
    "meet",
    "side_store",
    "memory_allocated_bytes",
    "pinned",
    "pinned_empty",
    "prepare",
    "run_local_ranks",
    "return_freed_memory",
    "synchronize",
    "using_adam",
    "wait_for_copies",
]
