"""Moving weights between two layouts: ours, megatron-core's `swap_model_weights` over gloo, and a plain memory copy.

python -m tests.benchmarks.reshard [--rounds 5] [--pairs ...]     (8 GiB; measures the installed megatron-core)

A model of 103 M parameters (12 layers, hidden 768, feed-forward 2048, vocabulary 18000), float32, on single-threaded
gloo ranks of one machine. Both sides move the same weights into a target of their own, which must come out equal; both
have moved once, so that plans are cached. Ours goes through memory that the ranks share, as on one machine without
GPUs, and once more by gloo messages, as between machines. The memory copy is every rank's target copied from memory to
memory. A time is that of the last rank; sides alternate in every round; figures are medians of the rounds' ratios.
"""

import argparse
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from megarlhf.config.layout import Layout
from megarlhf.weights.plan import BUCKET_BYTES
from tests.benchmarks import reshard_ranks
from tests.benchmarks.parallel import write_config
from tests.benchmarks.report import Row, finish
from tests.benchmarks.reshard_ranks import Held
from tests.distributed.pool import close_pools, run_on_ranks

PAIRS = {
    "pp2 to tp2": (2, Layout(pp=2), Layout(tp=2)),
    "tp2 to dp2": (2, Layout(tp=2), Layout()),
    "tp2 pp2 to tp2 dp2": (4, Layout(tp=2, pp=2), Layout(tp=2)),
    "tp2 pp2 to tp4": (4, Layout(tp=2, pp=2), Layout(tp=4)),
    "tp2 pp2 to dp4": (4, Layout(tp=2, pp=2), Layout()),
}
WAYS = ("ours", "megatron-core", "ours by messages", "memory copy")
RIVAL = f"megatron-core {version('megatron-core')}"
TARGET = ">= 2.0" if version("megatron-core").startswith("0.16") else ">= 1.0"


def main() -> None:
    """Three rows a pair: speed against the rival, against a memory copy, and peak extra memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        write_config(Path(folder), 18000)
        finish([row for name in options.pairs for row in rows_of(name, folder, options.rounds)], options.json)
    close_pools()


def rows_of(name: str, folder: str, num_rounds: int) -> list[Row]:
    """Measures one pair."""
    ranks, source, target = PAIRS[name]
    held = run_on_ranks(ranks, reshard_ranks.hold, folder, source, target)
    rounds = [{way: moved(ranks, way) for way in WAYS} for _ in range(num_rounds + 1)][1:]
    extra = {way: run_on_ranks(ranks, reshard_ranks.peak_move, way) for way in WAYS[:2]}
    run_on_ranks(ranks, reshard_ranks.let_go)
    return [*speed_rows(name, rounds, held), memory_row(name, extra, held)]


def moved(ranks: int, way: str) -> float:
    """Seconds until the last rank is done."""
    return max(run_on_ranks(ranks, reshard_ranks.timed_move, way))


def speed_rows(name: str, rounds: Sequence[dict[str, float]], held: Sequence[Held]) -> list[Row]:
    """Against the rival, and against a memory copy."""
    seconds = {way: statistics.median(each[way] for each in rounds) for way in WAYS}
    times = ", ".join(f"{way} {1e3 * each:.0f} ms" for way, each in seconds.items())
    total = sum(each.target_bytes for each in held)
    size = f"{total / 2**20:.0f} MiB in the target, {held[0].bytes_moved / 2**20:.0f} between ranks"
    ratios = [each["megatron-core"] / each["ours"] for each in rounds]
    copies = [each["ours"] / each["memory copy"] for each in rounds]
    spread = f"rounds {min(ratios):.2f} to {max(ratios):.2f}"
    messages = [each["megatron-core"] / each["ours by messages"] for each in rounds]
    return [
        Row(f"{name}: speed", statistics.median(ratios), f"x {RIVAL}", TARGET, f"{times}; {spread}; {size}"),
        Row(f"{name}: speed by messages", statistics.median(messages), f"x {RIVAL}"),
        Row(f"{name}: time", statistics.median(copies), "x memory copy", note=f"{held[0].num_messages} messages"),
    ]


def memory_row(name: str, extra: dict[str, list[int]], held: Sequence[Held]) -> Row:
    """Of the rank with the most: ours by the system, against one bucket."""
    ours, theirs = (max(extra[way]) / 2**20 for way in WAYS[:2])
    counted = max(each.buffer_bytes for each in held) / 2**20
    note = f"by the resident set; buffers by our own count {counted:.1f} MiB; {RIVAL} {theirs:.0f} MiB"
    return Row(f"{name}: peak extra memory", ours, "MiB", f"<= {BUCKET_BYTES / 2**20:.0f}", note)


if __name__ == "__main__":
    main()
