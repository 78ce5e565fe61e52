"""One learner update on two single-threaded processes as tp=2, pp=2 and dp=2, against one single-threaded process.

python -m tests.benchmarks.parallel [--rounds 5] [--layouts tp2 pp2 dp2]     (8 GiB of memory)

The model has 12 layers, hidden 768, 12 heads, 4 key/value groups, feed-forward 2048, a vocabulary of 32000 (head not
tied): 125 M parameters, random, float32. The batch has 8 rows of 64 prompt and 192 response tokens, one row a
micro-batch in every layout. An update is all of it: forward, backward, gradients summed, clipped and applied by Adam.
The ideal is half the time of the one process; sides alternate in every round; the figure is the median of the rounds'
ratios.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from megarlhf.config.layout import Layout
from tests.benchmarks import parallel_ranks
from tests.benchmarks.parallel_ranks import Case, Timed
from tests.benchmarks.report import Row, finish
from tests.distributed.pool import close_pools, run_on_ranks
from tests.tiny import tiny_config

ONE = "one process"
LAYOUTS = {
    "tp2": Layout(tp=2),
    "tp2 sp": Layout(tp=2, sp=True),
    "pp2": Layout(pp=2, first_stage_layers=8),
    "dp2": Layout(),
}
TARGETS = {"tp2": 1.6, "tp2 sp": 1.6, "pp2": 1.35, "dp2": 1.15}


def main() -> None:
    """Two rows a layout: time against the ideal, and bytes communicated per token."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--response", type=int, default=192)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--first_stage_layers", type=int, default=8, help="of pp2")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        write_config(Path(folder), options.vocabulary)
        names = [ONE, *options.layouts]
        for name in names:
            run_on_ranks(ranks(name), parallel_ranks.hold, name, case(name, folder, options))
        rounds = [{name: one_update(name) for name in names} for _ in range(options.rounds + 1)][1:]
    close_pools()
    tokens = options.rows * (options.prompt + options.response)
    finish([row for name in options.layouts for row in rows(name, rounds, tokens)], options.json)


def write_config(folder: Path, vocab_size: int) -> None:
    """config.json of the model of this benchmark."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "head_dim": 64}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(tiny_config(vocab_size=vocab_size, **sizes, **heads)))


def ranks(name: str) -> int:
    """Processes of a case."""
    return 1 if name == ONE else 2


def case(name: str, folder: str, options: argparse.Namespace) -> Case:
    """What the ranks of a case build."""
    layout = Layout() if name == ONE else LAYOUTS[name]
    if name == "pp2":
        layout = Layout(pp=2, first_stage_layers=options.first_stage_layers)
    tokens = options.prompt + options.response
    return Case(folder, layout, tokens, options.rows, options.prompt, options.response)


def one_update(name: str) -> Timed:
    """Seconds until the last rank is done, and bytes sent by all ranks."""
    timed = run_on_ranks(ranks(name), parallel_ranks.timed_update, name)
    result = Timed(max(each.seconds for each in timed), sum(each.bytes_sent for each in timed))
    print(f"{name}: {result.seconds:.2f} s", flush=True)
    return result


def rows(name: str, rounds: Sequence[dict[str, Timed]], tokens: int) -> list[Row]:
    """The rows of one layout."""
    seconds = [each[name].seconds for each in rounds]
    ratios = [each[name].seconds / (each[ONE].seconds / 2) for each in rounds]
    alone = statistics.median(each[ONE].seconds for each in rounds)
    note = (
        f"{statistics.median(seconds):.2f} s, one process {alone:.2f} s ({tokens / alone:.0f} tokens/s); "
        f"rounds {min(ratios):.2f} to {max(ratios):.2f}"
    )
    sent = statistics.median(each[name].bytes_sent for each in rounds) / tokens
    return [
        Row(f"update, {name}", statistics.median(ratios), "x ideal", f"<= {TARGETS[name]}", note),
        Row(f"communicated, {name}", sent / 2**10, "KiB/token", note=f"{tokens} tokens; sent by both ranks together"),
    ]


if __name__ == "__main__":
    main()
