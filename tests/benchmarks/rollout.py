"""Tokens per second of our generator and of transformers.generate, on one machine in one run.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.rollout MODEL_DIR [--sequences 64 --slots 32 --stop_every 40 ...]

Without --stop_every every response has --new tokens. With it, one vocabulary id in so many ends a response, so that
lengths are ragged as in real rollouts: transformers holds a finished row until its batch of --slots ends, we refill it.
Tokens count up to the one that ends a response.
"""

import argparse
import time

import torch

from megarlhf import device


def main() -> None:
    """Prints one line per generator: the best of --repeats."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--stop_every", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=1.0)
    arguments = parser.parse_args()
    device.prepare()
    device.join_world()
    prompts = _prompts(arguments)
    for name, measure in (("ours", _ours(arguments, prompts)), ("transformers", _transformers(arguments, prompts))):
        speed, tokens, seconds = max(_speed(measure) for _ in range(arguments.repeats))
        print(f"{name}: {speed:.1f} tokens/s ({tokens} tokens, {seconds:.2f} s)", flush=True)


def _prompts(arguments: argparse.Namespace) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.sequences, arguments.prompt)
    return [tuple(row) for row in torch.randint(100, 20000, shape, generator=generator).tolist()]


def _stop_ids(arguments: argparse.Namespace, vocab_size: int) -> tuple[int, ...]:
    return tuple(range(0, vocab_size, arguments.stop_every)) if arguments.stop_every else ()


def _ours(arguments: argparse.Namespace, prompts: list[tuple[int, ...]]):
    from megarlhf.config.layout import Layout
    from megarlhf.engines.generator import Generator, Request, Sampling
    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.parallel.groups import build_groups
    from megarlhf.weights.load import load_weights

    dtype = getattr(torch, arguments.dtype)
    architecture = Architecture.from_folder(arguments.model)
    model = build_model(architecture, build_groups(Layout(), 1), head="vocabulary", dtype=dtype, seed=None)
    load_weights(model, arguments.model)
    generator = Generator(model, max_slots=arguments.slots)
    requests = [Request(prompt, row) for row, prompt in enumerate(prompts)]
    sampling = Sampling(
        temperature=arguments.temperature,
        max_new_tokens=arguments.new,
        stop_ids=_stop_ids(arguments, architecture.vocab_size),
    )

    def measure() -> int:
        generator.generate(requests, sampling)
        return generator.report.num_tokens

    return measure


def _transformers(arguments: argparse.Namespace, prompts: list[tuple[int, ...]]):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype)).eval()
    stops = _stop_ids(arguments, model.config.vocab_size)
    model.generation_config.eos_token_id = list(stops) or None
    is_greedy = arguments.temperature == 0
    chosen = (
        {"do_sample": False} if is_greedy else {"do_sample": True, "temperature": arguments.temperature, "top_k": 0}
    )

    def measure() -> int:
        tokens = 0
        for start in range(0, len(prompts), arguments.slots):
            ids = torch.tensor(prompts[start : start + arguments.slots])
            mask = torch.ones_like(ids)
            out = model.generate(ids, attention_mask=mask, max_new_tokens=arguments.new, pad_token_id=0, **chosen)
            is_stop = torch.isin(out[:, ids.shape[1] :], torch.tensor(stops, dtype=torch.int64)).int()
            tokens += int((is_stop.cumsum(1) - is_stop == 0).sum())
        return tokens

    return measure


def _speed(measure) -> tuple[float, int, float]:
    start = time.perf_counter()
    tokens = measure()
    seconds = time.perf_counter() - start
    return tokens / seconds, tokens, seconds


if __name__ == "__main__":
    main()
