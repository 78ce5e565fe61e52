"""What one rank of the benchmark `parallel` does: holds learners, and times one update of each when asked."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from megarlhf.config.algorithms import PPO
from megarlhf.config.layout import Layout
from megarlhf.config.settings import Optimizer
from megarlhf.records.experience import Experience


@dataclass(frozen=True)
class Case:
    """A learner to build: the model in `folder` under `layout`, and the batch that it is updated on."""

    folder: str
    layout: Layout
    micro_batch_tokens: int
    num_rows: int
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True)
class Timed:
    """One update on one rank. The bytes are those written to sockets, by the kernel's count (/proc/self/io), and to the
    boxes through which gradients and weights pass."""

    seconds: float
    bytes_sent: int


_held: dict[str, tuple] = {}
"""(learner, parts) by the name of the case."""


def hold(rank: int, world_size: int, name: str, case: Case) -> None:
    """Build a case's learner with random weights, to be timed later (collective over the world)."""
    from megarlhf.algorithms.catalogue import PPO as ALGORITHM
    from megarlhf.engines.learner import Learner, Part
    from megarlhf.loop.objectives import objective
    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.parallel.groups import build_groups

    groups = build_groups(case.layout, world_size)
    architecture = Architecture.from_folder(case.folder)
    model = build_model(architecture, groups, head="vocabulary", dtype=torch.float32)
    learner = Learner(model, Optimizer(), total_updates=1000, max_tokens=case.micro_batch_tokens)
    part = Part(sampled_rows(case, architecture.vocab_size), objective(ALGORITHM, PPO(), "vocabulary"))
    _held[name] = learner, [part]


def timed_update(rank: int, world_size: int, name: str) -> Timed:
    """One update: forward, backward, gradients summed, clipped and applied (collective over the world)."""
    learner, parts = _held[name]
    dist.barrier()
    with boxed_bytes() as boxed:
        sent, start = _bytes_written(), time.perf_counter()
        result = learner.update(parts)
        dist.barrier()
        seconds = time.perf_counter() - start
    assert result.applied, "the update was skipped"
    return Timed(seconds, _bytes_written() - sent + sum(boxed))


@contextmanager
def boxed_bytes() -> Iterator[list[int]]:
    """Collects how many bytes this rank writes to boxes inside the block."""
    from megarlhf.parallel.parts import Boxes

    found: list[int] = []
    swap, share = Boxes.swap, Boxes.share

    def counted_swap(self, pieces):
        found.append(pieces[0].nbytes * (self.num_ranks - 1))
        return swap(self, pieces)

    def counted_share(self, piece):
        found.append(piece.nbytes)
        return share(self, piece)

    with patch.object(Boxes, "swap", counted_swap), patch.object(Boxes, "share", counted_share):
        yield found


def sampled_rows(case: Case, vocab_size: int) -> Experience:
    """Rows of equal length whose responses are trained on, the same on every rank."""
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[list[int]]:
        return torch.randint(0, vocab_size, (case.num_rows, length), generator=generator).tolist()

    logps = (-8 - torch.rand(case.num_rows, case.response_tokens, generator=generator)).tolist()
    rows = range(case.num_rows)
    batch = Experience.from_completions(
        ids(case.prompt_tokens), ids(case.response_tokens), logps, row_id=rows, group=rows, finished=[True] * len(rows)
    )
    advantage = torch.randn(batch.mask.shape, generator=generator) * batch.mask
    return batch.replace(logp_start=batch.logp_rollout, advantage=advantage)


def _bytes_written() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("wchar")).split()[1])
