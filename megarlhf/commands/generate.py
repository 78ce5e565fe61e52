"""`megarlhf generate`: responses of a model folder to a file of prompts, alone or on the ranks of a launch."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from megarlhf.config.answers import Answers
from megarlhf.errors import ConfigError
from megarlhf.loop.inference import (
    Summary,
    answers_violations,
    launch,
    load_model,
    load_tokenizer,
    progress,
    prompts_of,
    requests_for,
    sampling,
    write_rows,
)

SUMMARY = "sample responses: megarlhf generate MODEL_DIR --prompts FILE.jsonl --out FILE.jsonl [--flags]"


@dataclass(frozen=True)
class GenerateRun(Answers):
    """Settings of `megarlhf generate`."""

    out: str = ""
    """JSONL file to write: one line per sample, with id, sample, response, token_ids, logprobs and finish_reason."""


def main(argv: Sequence[str]) -> int:
    """Runs the command on every rank of the launch; returns the exit code."""
    return launch("generate", GenerateRun, require_valid, run_generate, argv)


def require_valid(model: str, settings: GenerateRun, world_size: int) -> None:
    """Raises ConfigError with everything that can be known to be wrong before a rank is joined or weights are read."""
    violations = answers_violations("generate", model, settings, world_size)
    if violations:
        raise ConfigError(violations)


def run_generate(model_folder: str, settings: GenerateRun, rank: int, world_size: int) -> Summary:
    """Generates, and writes the file on rank 0. Collective over the world, which is joined."""
    from megarlhf.engines.generator import Generator

    tokenizer = load_tokenizer(model_folder, settings.base, settings.stop_tokens)
    prompts = prompts_of(settings, tokenizer)
    model = load_model(model_folder, settings.tp, settings.pp, settings.dtype, world_size, base=settings.base)
    generator = Generator(model, settings.max_slots, follow=progress(settings, rank, world_size))
    requests = requests_for(prompts, settings.samples_per_prompt)
    start = time.perf_counter()
    completions = generator.generate(requests, sampling(settings, tokenizer.stop_ids))
    seconds = time.perf_counter() - start
    if rank == 0:
        rows = [
            {
                "id": prompts[index // settings.samples_per_prompt].metadata["id"],
                "sample": request.sample,
                "response": tokenizer.decode(completion.token_ids),
                "token_ids": completion.token_ids,
                "logprobs": completion.logps,
                "finish_reason": completion.finish_reason,
            }
            for index, (request, completion) in enumerate(zip(requests, completions, strict=True))
        ]
        write_rows(settings.out, rows)
    report = generator.report
    return Summary(
        f"{len(completions)} responses, {report.num_tokens} tokens in {seconds:.1f} s "
        f"({report.num_tokens / seconds:.0f} tokens/s), {report.num_near_ties} near ties (tokens that "
        f"rounding could have changed): {settings.out}",
        {
            "num_responses": len(completions),
            "num_tokens": report.num_tokens,
            "num_near_ties": report.num_near_ties,
            "generate_s": seconds,
            "out": settings.out,
        },
    )
