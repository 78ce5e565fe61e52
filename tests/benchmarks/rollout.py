"""Tokens per second of our generator and of transformers.generate: same prompts, same sampling, same threads, one run.

python -m tests.benchmarks.rollout [--dtypes float32 bfloat16] [--rounds 5] [--threads 2]     (needs `make assets`)

Prompts are beginnings of film reviews, their lengths evenly spread over --shortest to --longest tokens; responses are
sampled at temperature 1 and end by themselves or at --new tokens. transformers may batch as it likes: all rows at once,
left-padded; rows sorted by length in two or four batches; its continuous batching. Its fastest way (one timed round of
each, after one that warms up) then alternates with ours for --rounds rounds. Tokens count up to the one that ends a
response.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megarlhf import device
from tests.benchmarks.report import Row, finish

TEXTS = Path("assets/imdb_demonstrations.jsonl")
_TEXTS_A_PROMPT = 6
Measure = Callable[[], int]
"""Generates once; the number of tokens sampled."""


def main() -> None:
    """One row a dtype, and one for each way of transformers that was not the fastest."""
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
    ours = _ours(options, prompts, dtype)
    ways, speeds = _transformers(options, prompts, dtype), {}
    ours()
    for name, measure in ways.items():
        try:
            measure()
        except Exception as problem:  # a way that does not work here is not the fastest
            print(f"transformers, {name}: {type(problem).__name__}: {problem}", flush=True)
            continue
        speeds[name] = speed(measure)
    best = max(speeds, key=speeds.get)
    rounds = [(speed(ours), speed(ways[best])) for _ in range(options.rounds)]
    mine, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratios = sorted(one / other for one, other in rounds)
    note = (
        f"{mine:.0f} against {theirs:.0f} tokens/s ({best}), medians of {options.rounds} rounds; "
        f"ratios of single rounds {ratios[0]:.2f} to {ratios[-1]:.2f}; "
        + ", ".join(f"{name} {tokens_per_s:.0f}" for name, tokens_per_s in speeds.items() if name != best)
    )
    return [Row(f"rollout, {dtype}, {options.threads} threads", mine / theirs, "x transformers", ">= 2.0", note)]


def speed(measure: Measure) -> float:
    """Tokens per second of one call."""
    start = time.perf_counter()
    return measure() / (time.perf_counter() - start)


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
    sampling = Sampling(max_new_tokens=options.new, stop_ids=stop_ids(options.model))

    def measure() -> int:
        generator.generate(requests, sampling)
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
        return lambda: sum(_generate(model, part, stops, options.new) for part in parts)

    ways = {
        "one batch": static(1),
        "two batches by length": static(2),
        "four batches by length": static(4),
    }
    if hasattr(model, "generate_batch"):
        ways["continuous batching"] = lambda: _continuous(model, rows, stops, options.new)
    return ways


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


def _continuous(model, rows: Sequence[tuple[int, ...]], stops: tuple[int, ...], new: int) -> int:
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=new, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=list(stops),
        pad_token_id=stops[0],
    )  # fmt: skip
    answers = model.generate_batch([list(row) for row in rows], generation_config=config, progress_bar=False)
    assert len(answers) == len(rows), f"{len(answers)} of {len(rows)} rows answered"
    return sum(len(answer.generated_tokens) for answer in answers.values())


if __name__ == "__main__":
    main()
