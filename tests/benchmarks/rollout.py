"""Tokens per second of our generator and of transformers.generate, on one machine in one run.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.rollout MODEL_DIR [--sequences 32 --new 64 --dtype float32 ...]

Two loads: `equal` (every response has --new tokens, as with rewards that ignore length) and `ragged` (responses end
after 1/8 to 8/8 of it, as real rollouts do; transformers holds a finished row until its batch ends, we refill the slot).
Ragged ends are made by cutting: transformers is charged for whole batches, we get one request list per length.
"""

import argparse
import time

import torch

from megarlhf import device


def main() -> None:
    """Prints one line per measurement: best of --repeats."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=1.0)
    arguments = parser.parse_args()
    device.prepare()
    device.join_world()
    prompts = _prompts(arguments)
    for name, measure in (("ours", _ours(arguments, prompts)), ("transformers", _transformers(arguments, prompts))):
        seconds = min(_timed(measure) for _ in range(arguments.repeats))
        tokens = arguments.sequences * arguments.new
        print(f"{name}: {tokens / seconds:.1f} tokens/s ({tokens} tokens, {seconds:.2f} s)", flush=True)


def _prompts(arguments: argparse.Namespace) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.sequences, arguments.prompt)
    return [tuple(row) for row in torch.randint(100, 20000, shape, generator=generator).tolist()]


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
    generator = Generator(model, max_slots=arguments.sequences)
    requests = [Request(prompt, row) for row, prompt in enumerate(prompts)]
    sampling = Sampling(temperature=arguments.temperature, max_new_tokens=arguments.new)
    return lambda: generator.generate(requests, sampling)


def _transformers(arguments: argparse.Namespace, prompts: list[tuple[int, ...]]):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype)).eval()
    ids = torch.tensor(prompts)
    greedy = arguments.temperature == 0
    chosen = {"do_sample": False} if greedy else {"do_sample": True, "temperature": arguments.temperature, "top_k": 0}
    return lambda: model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=arguments.new,
        max_new_tokens=arguments.new,
        pad_token_id=0,
        **chosen,
    )


def _timed(measure) -> float:
    start = time.perf_counter()
    measure()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
