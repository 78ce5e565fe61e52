"""What a step costs the host of a rank for every sampled token that it holds: records, results, credit, plans.

    python -m tests.benchmarks.rows [--rows 2048 --prompt 1024 --response 1024 --ranks 64]

Every rank holds the records of the whole step, or of its shard (`rollout.shards`): this work is not shared out, and
grows with the rows that are held. Everything that a PPO step does with them is timed once on a batch of that size, in
one thread of one process, and exchanges between two; the models are left out, and what a rank does for its own rows
only. Last, credit on two ranks at once: all of the batch on both, and a shard on each. Responses are ragged, of
7/8 of --response or more; a token is a sampled one. The sum is what the planner counts for each of them
(`HOST_TOKEN_S` in loop/planner/step_time.py), which leaves out the wire.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarlhf import device
from tests.benchmarks.report import Row, finish
from tests.distributed.pool import close_pools, run_on_ranks

if TYPE_CHECKING:  # once the device is prepared
    from megarlhf.engines.generator import Completions
    from megarlhf.records.experience import Experience


@dataclass(frozen=True)
class Size:
    """A batch of `rows`, shared out over `ranks`."""

    rows: int
    prompt: int
    response: int
    ranks: int

    def lengths(self) -> torch.Tensor:
        """[rows] int64: tokens of each response."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(7 * self.response // 8, self.response + 1, (self.rows,), generator=generator)

    def numbers(self) -> torch.Tensor:
        """[tokens] float32: one for each sampled token."""
        return torch.randn(int(self.lengths().sum()), generator=torch.Generator().manual_seed(1))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=64, help="data-parallel ranks that share the batch, on paper")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device.prepare()
    torch.set_num_threads(1)
    size = Size(options.rows, options.prompt, options.response, options.ranks)
    num_tokens = int(size.lengths().sum())
    pieces = pieces_of(size)
    seconds = {
        name: median([_seconds(piece) for _ in range(options.rounds + 1)][1:]) for name, (_, piece) in pieces.items()
    }
    counts = {name: count for name, (count, _) in pieces.items()}
    seconds["an exchange of results between two ranks"] = max(run_on_ranks(2, exchange, size))
    counts["an exchange of results between two ranks"] = 3
    whole, shards = (max(run_on_ranks(2, credit, size, held)) for held in ([], [[0], [1]]))
    close_pools()
    note = f"{size.rows} rows of {size.prompt} and up to {size.response} tokens, {num_tokens} sampled"
    found = []
    for name, taken in seconds.items():
        times = f"{counts[name]} times a step, " if counts[name] > 1 else "a peer, " if not counts[name] else ""
        found.append(Row(name, 1e6 * taken / num_tokens, "us a token", note=f"{times}{taken:.3f} s"))
    total = sum(counts[name] * taken for name, taken in seconds.items()) / num_tokens
    found.append(Row("all of a PPO step", 1e6 * total, "us a token", note=note))
    times = f"{shards:.3f} against {whole:.3f} s on two ranks, sums over the shards included"
    finish(
        [*found, Row("credit of a batch in two shards", shards / whole, "x that of all of it", note=times)],
        options.json,
    )


Piece = Callable[[], object]


def pieces_of(size: Size) -> dict[str, tuple[int, Piece]]:
    """By name, how often a PPO step with a reference does it (0: it is there to compare with), and the work."""
    from megarlhf.algorithms.credit import ppo_credit
    from megarlhf.algorithms.state import ppo_state
    from megarlhf.config.algorithms import PPO
    from megarlhf.engines.generator import Request
    from megarlhf.engines.generator.generator import share_requests
    from megarlhf.engines.pipeline import plan_rows
    from megarlhf.loop.rollouts import experience_of
    from megarlhf.records.experience import scatter_flat, valid_values
    from megarlhf.records.spans import Spans
    from megarlhf.records.tokens import Denominators

    lengths, numbers, settings = size.lengths(), size.numbers(), PPO()
    samples, completions = sampled(size)
    batch, scored = scored_batch(size)
    ids = [list(sample.prompt.token_ids) for sample in samples]
    requests = [Request(sample.prompt.token_ids, sample.prompt.row_id) for sample in samples]
    tokens = completions.token_ids
    credited = ppo_credit(scored, settings, ppo_state(settings))[0].replace(
        token_reward=None, entropy=None, prompts=(), responses=(), metadata=()
    )
    order = torch.randperm(size.rows)
    quarters = order.tensor_split(4)
    parts = [credited.select(part) for part in quarters]
    pairs = list(zip(ids, (part.tolist() for part in tokens.split(lengths.tolist())), strict=True))
    return {
        "requests shared out": (1, lambda: share_requests(requests, size.response, size.ranks)),
        "records made of completions": (1, lambda: experience_of(samples, completions, NoTokenizer())),
        "records made of lists": (0, lambda: from_lists(pairs)),
        "a scorer's results put in": (4, lambda: batch.replace(value=scatter_flat(numbers, batch.mask))),
        "credit of PPO": (1, lambda: ppo_credit(scored, settings, ppo_state(settings))),
        "minibatches": (2, lambda: [credited.select(part) for part in quarters]),
        "denominators": (2, lambda: [Denominators.of(part) for part in parts]),
        "a plan of micro-batches": (
            5,
            lambda: plan_rows(Spans.of(batch, "before", shares_prompts=True), size.ranks, 8192),
        ),
        "mean entropy": (1, lambda: valid_values(scored.entropy, scored.mask).mean()),
    }


def sampled(size: Size) -> tuple[list, "Completions"]:
    """Samples to draw, and what was drawn."""
    from megarlhf.engines.generator import Completions
    from megarlhf.records.prompts import Prompt, siblings

    numbers, generator = size.numbers(), torch.Generator().manual_seed(2)
    ids = torch.randint(0, 32000, (size.rows, size.prompt), generator=generator).tolist()
    samples = siblings([Prompt(row, tuple(one), "text", {}) for row, one in enumerate(ids)], 1)
    tokens = torch.randint(0, 32000, (len(numbers),), generator=generator)
    near_ties = torch.zeros(len(numbers), dtype=torch.bool)
    return samples, Completions.of(tokens, numbers, near_ties, size.lengths(), (0,))


def scored_batch(size: Size) -> tuple["Experience", "Experience"]:
    """A batch as it was sampled, and as credit finds it."""
    from megarlhf.loop.rollouts import experience_of

    batch = experience_of(*sampled(size), NoTokenizer())
    return batch, batch.replace(
        logp_start=batch.logp_rollout + 0.01,
        logp_reference=batch.logp_rollout - 0.01,
        entropy=batch.logp_rollout.abs(),
        value=batch.logp_rollout * 0.1,
        score=torch.randn(size.rows, generator=torch.Generator().manual_seed(3)),
    )


class NoTokenizer:
    """Texts are not read here."""

    def decode(self, token_ids: list[int]) -> str:
        """Of no use."""
        raise AssertionError("a text is decoded where it is read")


def from_lists(pairs: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Ids [B, S] row by row from lists, as one would without care."""
    rows = [torch.tensor([*prompt, *response]) for prompt, response in pairs]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def exchange(rank: int, world_size: int, size: Size) -> float:
    """Seconds to bring two numbers a token of all rows to this rank, which has every other row (collective)."""
    from megarlhf.parallel.rows import gather_rows

    torch.set_num_threads(1)
    rows = list(range(rank, size.rows, world_size))
    lengths = (2 * size.lengths()[rows]).tolist()
    values = torch.randn(sum(lengths))
    times = []
    for _ in range(3):
        dist.barrier()
        times.append(_seconds(lambda: gather_rows(rows, lengths, values, size.rows, dist.group.WORLD)))
    return median(times)


def credit(rank: int, world_size: int, size: Size, shards: list[list[int]]) -> float:
    """Seconds of credit on the rows that this rank holds: all, or those of its shard (collective)."""
    from megarlhf.algorithms.credit import ppo_credit
    from megarlhf.algorithms.state import ppo_state
    from megarlhf.config.algorithms import PPO
    from megarlhf.config.layout import Layout
    from megarlhf.parallel.groups import build_groups

    torch.set_num_threads(1)
    shard, settings = build_groups(Layout(), world_size, shards).shard, PPO()
    held = scored_batch(size)[1].select(shard.part(size.rows))
    times = []
    for _ in range(3):
        dist.barrier()
        times.append(_seconds(lambda: ppo_credit(held, settings, ppo_state(settings), shard)))
    return median(times)


def _seconds(work: Piece) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
