"""Memory of log-probs over a large vocabulary, chunked against whole, and of activations, kept against recomputed.

python -m tests.benchmarks.memory [--rounds 5] [--tokens 1024] [--vocabulary 128256]     (4 GiB of memory)

Log-probs: values and gradients (of hidden states and of the head's weight) for --tokens positions, float32, by
`fused_logprob` and by log_softmax of the whole logits; the sides alternate in every round. Both end with the weight's
gradient added to the buffer that a learner sums gradients in. Peak memory is the system's (the high-water mark of the
resident set, set back before each measurement) above what was there before: weight, buffer and hidden states do not
count. Activations: what autograd keeps for one micro-batch of the model
of `tests.benchmarks.parallel`, counted by storage.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megarlhf import device
from tests.benchmarks.parallel import write_config
from tests.benchmarks.report import Row, finish

Step = Callable[[], object]


def main() -> None:
    """Rows of both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device.prepare()
    device.join_world()
    torch.set_num_threads(options.threads)
    finish([*logprob_rows(options), *activation_rows(rows=1, prompt=64, response=192)], options.json)


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def measured(step: Step) -> tuple[float, int]:
    """(seconds, bytes above what was resident before) of one call."""
    gc.collect()
    device.empty_cache()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins again
    before, start = resident("VmRSS"), time.perf_counter()
    step()
    return time.perf_counter() - start, resident("VmHWM") - before


def logprob_rows(options: argparse.Namespace) -> list[Row]:
    """Ratios of peak memory and of time."""
    sides = logprob_sides(options.tokens, options.hidden, options.vocabulary)
    rounds = [{name: measured(step) for name, step in sides.items()} for _ in range(options.rounds + 1)][1:]
    what = f"log-probs and gradients, {options.tokens} tokens, vocabulary {options.vocabulary}, hidden {options.hidden}"
    rows = []
    for place, unit, bound in ((1, "peak memory", 0.25), (0, "time", 1.15)):
        chunked, whole = (statistics.median(each[name][place] for each in rounds) for name in ("chunked", "whole"))
        ratios = [each["chunked"][place] / each["whole"][place] for each in rounds]
        scale, word = (2**20, "MiB") if place else (1, "s")
        times = f"{chunked / scale:.4g} against {whole / scale:.4g} {word}"
        note = f"{times}; rounds {min(ratios):.2f} to {max(ratios):.2f}"
        rows.append(Row(f"{what}: {unit}", statistics.median(ratios), "x whole logits", f"<= {bound}", note))
    return rows


def logprob_sides(num_tokens: int, hidden_size: int, vocab_size: int) -> dict[str, Step]:
    """Two ways to the same numbers; each ends with gradients, which it drops."""
    from megarlhf.parallel.logprob import fused_logprob

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).requires_grad_()
    weight = (torch.randn(vocab_size, hidden_size, generator=generator) * hidden_size**-0.5).requires_grad_()
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    slopes = torch.randn(num_tokens, generator=generator)

    buffer = torch.zeros(vocab_size, hidden_size)

    def hidden_gradient(logp: torch.Tensor) -> torch.Tensor:
        hidden.grad = None
        (logp * slopes).sum().backward()
        return hidden.grad

    def whole() -> tuple[torch.Tensor, ...]:
        logp = torch.log_softmax(hidden @ weight.t(), dim=-1).gather(1, targets[:, None])[:, 0]
        gradient = hidden_gradient(logp)
        buffer.add_(weight.grad)
        weight.grad = None
        return logp.detach(), gradient

    def chunked() -> tuple[torch.Tensor, ...]:
        options = {"group": torch.distributed.group.WORLD, "vocab_size": vocab_size, "weight_gradient": buffer}
        logp, _ = fused_logprob(hidden, weight, targets, **options)
        return logp.detach(), hidden_gradient(logp)

    sides = {"chunked": chunked, "whole": whole}
    answers = []
    for step in sides.values():
        buffer.zero_()
        answers.append((*step(), buffer.clone()))
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-4, atol=1e-5)
    return sides


def activation_rows(rows: int, prompt: int, response: int) -> list[Row]:
    """Bytes a token that autograd keeps for the backward pass, and what recomputing them costs."""
    found = {}
    with TemporaryDirectory() as folder:
        write_config(Path(folder), 32000)
        for recompute in ("none", "selective", "full"):
            found[recompute] = kept_by_update(folder, recompute, (rows, prompt, response))
    tokens = rows * (prompt + response)
    return [
        Row(
            f"activations, recompute {name}",
            kept / tokens / 2**10,
            "KiB/token",
            note=f"{tokens} tokens, 12 layers, hidden 768, float32; {kept / found['none'][0]:.0%} of none; forward and "
            f"backward {seconds:.2f} s",
        )
        for name, (kept, seconds) in found.items()
    ]


def kept_by_update(folder: str, recompute: str, sizes: tuple[int, int, int]) -> tuple[int, float]:
    """(most bytes kept at once, median seconds of forward and backward)."""
    from megarlhf.algorithms.catalogue import PPO as ALGORITHM
    from megarlhf.config.algorithms import PPO
    from megarlhf.config.layout import Layout
    from megarlhf.config.settings import Optimizer
    from megarlhf.engines.learner import Learner, Part
    from megarlhf.loop.objectives import objective
    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.parallel.groups import build_groups
    from tests.benchmarks.parallel_ranks import Case, sampled_rows
    from tests.engines.kept import KeptBytes

    architecture, case = Architecture.from_folder(folder), Case(folder, Layout(), 10**6, *sizes)
    groups = build_groups(Layout(), 1)
    model = build_model(architecture, groups, head="vocabulary", dtype=torch.float32, recompute=recompute)
    learner = Learner(model, Optimizer(), total_updates=1, max_tokens=case.micro_batch_tokens)
    parts = [Part(sampled_rows(case, architecture.vocab_size), objective(ALGORITHM, PPO(), "vocabulary"))]
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        learner.accumulate(parts)
        seconds.append(time.perf_counter() - start)
    with KeptBytes(model.named_parameters().values()) as kept:
        learner.accumulate(parts)
    return kept.peak, statistics.median(seconds)


if __name__ == "__main__":
    main()
