"""What one rank of the benchmark `reshard` does: holds a model in two layouts and moves its weights in several ways."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megarlhf import device
from megarlhf.config.layout import Layout


@dataclass(frozen=True)
class Held:
    """What a rank holds of a pair of layouts; bytes between ranks are over the whole world."""

    target_bytes: int
    bytes_moved: int
    num_messages: int
    buffer_bytes: int
    """Most bytes of our buffers at once, by our own account."""


_ways: dict[str, Callable[[], object]] = {}


def hold(rank: int, world_size: int, folder: str, source: Layout, target: Layout) -> Held:
    """Build a pair, once more for the other side, move once each way and compare (collective over the world)."""
    from megatron.core.resharding import refit, swap_model_weights

    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.parallel.groups import build_groups
    from megarlhf.weights.exchange import Resharder

    _ways.clear()  # the last pair's models go before this one's come
    if hasattr(refit, "clear_plan_cache"):
        refit.clear_plan_cache()  # keyed by parallel sizes only
    architecture = Architecture.from_folder(folder)
    groups = build_groups(source, world_size), build_groups(target, world_size)
    one = build_model(architecture, groups[0], head="vocabulary", dtype=torch.float32, seed=0)
    ours, theirs = (
        build_model(architecture, groups[1], head="vocabulary", dtype=torch.float32, seed=None) for _ in range(2)
    )
    resharder, messenger = Resharder(one, ours), Resharder(one, ours, shares_memory=False)
    messenger.run()
    report = resharder.run()
    swap_model_weights([one.chunks[0]], [theirs.chunks[0]], "gloo")
    pairs = ours.named_parameters(), theirs.named_parameters()
    assert all(torch.equal(pairs[0][key], pairs[1][key]) for key in pairs[0]), "the two sides' weights differ"
    blank = [torch.zeros_like(parameter.data) for parameter in pairs[0].values()]

    def copy() -> None:
        for to, parameter in zip(blank, pairs[0].values(), strict=True):
            to.copy_(parameter.data)

    _ways["ours"] = resharder.run
    _ways["ours by messages"] = messenger.run
    _ways["megatron-core"] = lambda: swap_model_weights([one.chunks[0]], [theirs.chunks[0]], "gloo")
    _ways["memory copy"] = copy
    target_bytes = sum(parameter.nbytes for parameter in pairs[0].values())
    return Held(target_bytes, report.bytes_moved, report.num_messages, report.peak_extra_bytes)


def timed_move(rank: int, world_size: int, way: str) -> float:
    """Seconds of moving all weights once, in one way, until the last rank is done (collective over the world)."""
    dist.barrier()
    start = time.perf_counter()
    _ways[way]()
    dist.barrier()
    return time.perf_counter() - start


def peak_move(rank: int, world_size: int, way: str) -> int:
    """The system's high-water mark in one move, bytes above what was resident before (collective over the world).

    Memory that ranks share for our moves is kept between them: it counts as ours, on every rank that has touched it.
    """
    device.empty_cache()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins again
    before = _resident("VmRSS") - (_resident("RssShmem") if way == "ours" else 0)
    timed_move(rank, world_size, way)
    return _resident("VmHWM") - before


def let_go(rank: int, world_size: int) -> None:
    """Drop the models."""
    _ways.clear()


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])
