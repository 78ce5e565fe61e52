"""`megarlhf generate`: responses of a model folder to a file of prompts, alone or on the ranks of a launch."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarlhf.config.layout import Layout
from megarlhf.config.load import load
from megarlhf.config.settings import Precision
from megarlhf.errors import ConfigError

SUMMARY = "sample responses: megarlhf generate MODEL_DIR --prompts FILE.jsonl --out FILE.jsonl [--flags]"


@dataclass(frozen=True)
class GenerateRun:
    """Settings of `megarlhf generate`. What is left of the launched ranks after tp * pp shares the prompts (dp)."""

    prompts: str = ""
    """JSONL file: `{"id": ..., "prompt": text}` or `{"id": ..., "messages": [...]}` per line; default id: the row."""
    out: str = ""
    """JSONL file to write: one line per sample, with id, sample, response, token_ids, logprobs and finish_reason."""
    n: int = 1
    """Samples per prompt; they share one prefill."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: int = 0
    """Sample among the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Sample among the most likely tokens that hold this much probability."""
    max_new_tokens: int = 256
    """A response is cut here."""
    min_new_tokens: int = 0
    """Stop tokens cannot be sampled before this many tokens."""
    stop_tokens: tuple[str, ...] = ()
    """Further tokens that end a response, besides the model's own end tokens."""
    seed: int = 0
    """Seed of the sampling noise: the same text in any layout and batch."""
    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    dtype: Precision = "float32"
    """Precision of weights and activations."""
    max_slots: int = 64
    """Sequences decoded at once per data-parallel rank; a finished one's slot is refilled."""


def main(argv: Sequence[str]) -> int:
    """Runs the command on every rank of the launch; returns the exit code."""
    words = list(argv)
    model = words.pop(0) if words and not words[0].startswith("-") else ""
    settings = load(GenerateRun, None, words, prog="megarlhf generate MODEL_DIR")
    from megarlhf import device

    world_size = device.launched_world_size()
    device.prepare()
    require_valid(model, settings, world_size)
    rank, world_size = device.join_world()
    report = run_generate(model, settings, rank, world_size)
    if rank == 0:
        print(report)
    device.leave_world()
    return 0


def require_valid(model: str, settings: GenerateRun, world_size: int) -> None:
    """Raises ConfigError with everything that can be known to be wrong before a rank is joined or weights are read."""
    from megarlhf.models.architecture import Architecture, layout_violations

    violations = [] if model else ["MODEL_DIR: not given; name the model's folder: megarlhf generate MODEL_DIR ..."]
    violations += [f"--{name}: not given; name a JSONL file" for name in ("prompts", "out") if not vars(settings)[name]]
    if settings.out and not Path(settings.out).absolute().parent.is_dir():
        violations.append(f"--out: folder {Path(settings.out).absolute().parent} does not exist; make it first")
    for name in ("n", "max_slots", "tp", "pp"):
        if vars(settings)[name] < 1:
            violations.append(f"--{name} {vars(settings)[name]}: use 1 or more")
    try:
        _sampling(settings, ())
    except ConfigError as error:
        violations += [f"--{violation}" for violation in error.violations]
    if settings.tp > 0 and settings.pp > 0:
        violations += _launch_violations(settings, world_size)
        if model:
            layout = Layout(tp=settings.tp, pp=settings.pp)
            violations += layout_violations(Architecture.from_folder(model), layout, "generate")
    if violations:
        raise ConfigError(violations)


def _launch_violations(settings: GenerateRun, world_size: int) -> list[str]:
    ranks = settings.tp * settings.pp
    if world_size % ranks == 0:
        return []
    return [
        f"--tp {settings.tp} --pp {settings.pp}: needs {ranks} ranks or a multiple, and there are {world_size}; "
        f"launch with torchrun --nproc-per-node {ranks} -m megarlhf generate ..."
    ]


def run_generate(model_folder: str, settings: GenerateRun, rank: int, world_size: int) -> str:
    """Generates, writes the file on rank 0, returns a line about it. Collective over the world, which is joined."""
    from megarlhf.config.settings import Data
    from megarlhf.data.prompts import read_prompts
    from megarlhf.data.tokenizer import Tokenizer
    from megarlhf.engines.generator import Request

    tokenizer = Tokenizer(model_folder, settings.stop_tokens)
    # the generator knows the model's limit and says so
    prompts = read_prompts(settings.prompts, tokenizer, Data(prompts=settings.prompts, max_prompt_tokens=2**31))
    generator = _generator(model_folder, settings, world_size)
    requests = [Request(prompt.token_ids, prompt.row_id, sample) for prompt in prompts for sample in range(settings.n)]
    start = time.perf_counter()
    completions = generator.generate(requests, _sampling(settings, tokenizer.stop_ids))
    seconds = time.perf_counter() - start
    if rank == 0:
        rows = [
            {
                "id": prompts[index // settings.n].metadata["id"],
                "sample": request.sample,
                "response": tokenizer.decode(completion.token_ids),
                "token_ids": completion.token_ids,
                "logprobs": completion.logps,
                "finish_reason": completion.finish_reason,
            }
            for index, (request, completion) in enumerate(zip(requests, completions, strict=True))
        ]
        _write(Path(settings.out), rows)
    report = generator.report
    return (
        f"{len(completions)} responses, {report.num_tokens} tokens in {seconds:.1f} s "
        f"({report.num_tokens / seconds:.0f} tokens/s), {report.num_near_ties} near ties: {settings.out}"
    )


def _generator(model_folder: str, settings: GenerateRun, world_size: int):
    import torch

    from megarlhf.engines.generator import Generator
    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.parallel.groups import build_groups
    from megarlhf.weights.load import load_weights

    groups = build_groups(Layout(tp=settings.tp, pp=settings.pp), world_size)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.dtype]
    model = build_model(Architecture.from_folder(model_folder), groups, head="vocabulary", dtype=dtype, seed=None)
    load_weights(model, model_folder)
    return Generator(model, settings.max_slots)


def _sampling(settings: GenerateRun, stop_ids: tuple[int, ...]):
    from megarlhf.engines.generator.requests import Sampling

    return Sampling(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        max_new_tokens=settings.max_new_tokens,
        min_new_tokens=settings.min_new_tokens,
        stop_ids=stop_ids,
        seed=settings.seed,
    )


def _write(path: Path, rows: list[dict]) -> None:
    """Appears under its name only when it is whole."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    part.replace(path)
