"""Tokens per second of our generator and of transformers.generate: same prompts, same sampling, same threads, one run.

python -m tests.benchmarks.rollout [--dtypes float32 bfloat16] [--rounds 5] [--threads 2]     (needs `make assets`)

Prompts are beginnings of film reviews, their lengths evenly spread over --shortest to --longest tokens; responses are
sampled at temperature 1 and end by themselves or at --new tokens. transformers may batch as it likes: all rows at once,
left-padded; rows sorted by length in two or four batches. Its fastest way (one timed round of each, after some tokens
to warm up) then alternates with ours for --rounds rounds. Its continuous batching is tried last, with a limit of time.
Tokens count up to the one that ends a response.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from megarlhf import device
from tests.benchmarks.report import Row, finish

TEXTS = Path("assets/imdb_demonstrations.jsonl")
_TEXTS_A_PROMPT = 6
Measure = Callable[[int], int]
"""Generates once, at most so many tokens a row; the number of tokens sampled."""
_WARM_UP = 8
_PATIENCE = 3
"""Continuous batching may take so many times the time of the fastest other way."""
_BLOCK = 16
"""Tokens in a page of its cache."""


def main() -> None:
    """One row a dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="assets/SmolLM2-135M-Instruct")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--shortest", type=int, default=8)
    parser.add_argument("--longest", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--continuous", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device.prepare()
    device.join_world()
    torch.set_num_threads(options.threads)
    prompts = read_prompts(options)
    finish([row for dtype in options.dtypes for row in compared(options, prompts, dtype)], options.json)


def read_prompts(options: argparse.Namespace) -> list[tuple[int, ...]]:
    """Token ids of --prompts texts, in an order that is not by length."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    lengths = torch.linspace(options.shortest, options.longest, options.prompts).round().int()
    lengths = lengths[torch.randperm(options.prompts, generator=torch.Generator().manual_seed(0))].tolist()
    rows = [json.loads(line) for line in TEXTS.read_text().splitlines()]
    texts = [row["prompt"] + row["response"] for row in rows]
    starts = range(0, _TEXTS_A_PROMPT * options.prompts, _TEXTS_A_PROMPT)
    rows = [tokenizer(" ".join(texts[at : at + _TEXTS_A_PROMPT])).input_ids for at in starts]
    prompts = [tuple(ids[:length]) for ids, length in zip(rows, lengths, strict=True)]
    assert [len(prompt) for prompt in prompts] == lengths, "the texts are long enough"
    return prompts


def compared(options: argparse.Namespace, prompts: Sequence[tuple[int, ...]], dtype: str) -> list[Row]:
    """The ratio of the medians, and how the other ways of transformers fared."""
    ours, ways = _ours(options, prompts, dtype), _transformers(options, prompts, dtype)
    for measure in (ours, *ways.values()):
        measure(_WARM_UP)
    speeds = {name: speed(measure, options.new) for name, measure in ways.items()}
    best = max(speeds, key=speeds.get)
    rounds = [(speed(ours, options.new), speed(ways[best], options.new)) for _ in range(options.rounds)]
    mine, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratios = sorted(one / other for one, other in rounds)
    note = (
        f"{mine:.0f} against {theirs:.0f} tokens/s ({best}), medians of {options.rounds} rounds; "
        f"ratios of single rounds {ratios[0]:.2f} to {ratios[-1]:.2f}; "
        + ", ".join(f"{name} {tokens_per_s:.0f}" for name, tokens_per_s in speeds.items() if name != best)
    )
    limit_s = _PATIENCE * len(prompts) * options.samples * options.new / theirs
    continuous = _continuous_speed(options, prompts, dtype, limit_s) if options.continuous else None
    if options.continuous:
        note += ", continuous batching " + (f"{continuous:.0f}" if continuous else f"not done in {limit_s:.0f} s")
    assert not continuous or continuous < theirs, "continuous batching is their fastest way: let it alternate"
    return [Row(f"rollout, {dtype}, {options.threads} threads", mine / theirs, "x transformers", ">= 2.0", note)]


def speed(measure: Measure, new: int) -> float:
    """Tokens per second of one call."""
    start = time.perf_counter()
    return measure(new) / (time.perf_counter() - start)


def _ours(options: argparse.Namespace, prompts: Sequence[tuple[int, ...]], dtype: str) -> Measure:
    from megarlhf.config.layout import Layout
    from megarlhf.engines.generator import Generator, Request, Sampling
    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.parallel.groups import build_groups
    from megarlhf.weights.load import load_weights

    architecture, groups = Architecture.from_folder(options.model), build_groups(Layout(), 1)
    model = build_model(architecture, groups, head="vocabulary", dtype=getattr(torch, dtype), seed=None)
    load_weights(model, options.model)
    generator = Generator(model, max_slots=len(prompts) * options.samples)
    requests = [Request(prompt, row, sample) for row, prompt in enumerate(prompts) for sample in range(options.samples)]

    def measure(new: int) -> int:
        generator.generate(requests, Sampling(max_new_tokens=new, stop_ids=stop_ids(options.model)))
        return generator.report.num_tokens

    return measure


def stop_ids(model: str) -> tuple[int, ...]:
    """What ends a response by itself."""
    found = json.loads((Path(model) / "generation_config.json").read_text())["eos_token_id"]
    return tuple(found) if isinstance(found, list) else (found,)


def _transformers(options: argparse.Namespace, prompts: Sequence[tuple[int, ...]], dtype: str) -> dict[str, Measure]:
    """Ways to batch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, dtype)).eval()
    stops = stop_ids(options.model)
    rows = [prompt for prompt in prompts for _ in range(options.samples)]
    by_length = sorted(rows, key=len)

    def static(batches: int) -> Measure:
        size = -(-len(rows) // batches)
        parts = [by_length[at : at + size] for at in range(0, len(rows), size)] if batches > 1 else [rows]
        return lambda new: sum(_generate(model, part, stops, new) for part in parts)

    return {"one batch": static(1), "two batches by length": static(2), "four batches by length": static(4)}


def _generate(model, rows: Sequence[tuple[int, ...]], stops: tuple[int, ...], new: int) -> int:
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        eos_token_id=list(stops), pad_token_id=stops[0],
    )  # fmt: skip
    is_stop = torch.isin(out[:, longest:], torch.tensor(stops)).int()
    return int((is_stop.cumsum(1) - is_stop == 0).sum())


def _continuous_speed(options, prompts: Sequence[tuple[int, ...]], dtype: str, limit_s: float) -> float | None:
    """Tokens per second of transformers' continuous batching, which has no way to stop: in a process of its own.

    None if it is not done in `limit_s` seconds.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_continuous_process, args=(options, prompts, dtype, theirs))
    process.start()
    assert ours.recv() == "ready"
    found = ours.recv() if ours.poll(limit_s) else None
    process.kill()
    process.join()
    return found


def _continuous_process(options, prompts: Sequence[tuple[int, ...]], dtype: str, connection: Connection) -> None:
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, dtype)).eval()
    stops, rows = stop_ids(options.model), [list(prompt) for prompt in prompts for _ in range(options.samples)]
    config = GenerationConfig(
        max_new_tokens=options.new, do_sample=True, top_k=0, eos_token_id=list(stops), pad_token_id=stops[0]
    )
    # by default its cache takes most of the memory, and attention reads all of it
    blocks = len(rows) * -(-(options.longest + options.new) // _BLOCK)
    sizes = ContinuousBatchingConfig(page_size=_BLOCK, num_blocks=blocks, max_batch_tokens=16 * _BLOCK)
    connection.send("ready")
    start = time.perf_counter()
    answers = model.generate_batch(rows, generation_config=config, continuous_batching_config=sizes, progress_bar=False)
    assert len(answers) == len(rows), f"{len(answers)} of {len(rows)} rows answered"
    connection.send(sum(len(one.generated_tokens) for one in answers.values()) / (time.perf_counter() - start))


if __name__ == "__main__":
    main()
