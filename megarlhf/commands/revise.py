"""`megarlhf revise`: constitutional critique and revision. A model answers, criticizes its answer, and rewrites it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megarlhf.config.answers import Answers
from megarlhf.errors import ConfigError, DataError
from megarlhf.loop.inference import (
    Summary,
    answers_violations,
    launch,
    load_model,
    load_tokenizer,
    principles_violations,
    progress,
    prompts_of,
    told,
    write_rows,
)

SUMMARY = "answers revised by principles: megarlhf revise MODEL_DIR --prompts FILE.jsonl --out FILE.jsonl [--flags]"


@dataclass(frozen=True)
class ReviseRun(Answers):
    """Settings of `megarlhf revise` (Constitutional AI, Bai et al. 2022, section 3.1)."""

    out: str = ""
    """JSONL file to write, which sft reads: one line per revised answer, with id, sample, prompt, response, and how it
    came about: answer (the first one) and steps (principle, critique and revision of each round)."""
    principles: str = ""
    """Text file with one principle a line; empty: megarlhf/data/constitution.txt."""
    rounds: int = 1
    """Critiques and revisions of each answer, every round under another principle."""
    keep_cut: bool = False
    """Keep answers whose last revision was cut at max_new_tokens. Whoever learns from the file takes them for whole."""


def main(argv: Sequence[str]) -> int:
    """Runs the command on every rank of the launch; returns the exit code."""
    return launch("revise", ReviseRun, require_valid, run_revise, argv)


def require_valid(model: str, settings: ReviseRun, world_size: int) -> None:
    """Raises ConfigError with everything that can be known to be wrong before a rank is joined or weights are read."""
    violations = answers_violations("revise", model, settings, world_size)
    violations += principles_violations(settings.principles, "rounds", settings.rounds)
    if violations:
        raise ConfigError(violations)


def run_revise(model_folder: str, settings: ReviseRun, rank: int, world_size: int) -> Summary:
    """Answers, criticizes, revises, and writes the file on rank 0. Collective over the world, which is joined.

    Raises DataError when no revised answer is left.
    """
    from megarlhf.data.principles import read_principles
    from megarlhf.engines.generator import Generator
    from megarlhf.loop.revising import Writer

    left_out: Counter[str] = Counter()
    tokenizer = load_tokenizer(model_folder, settings.base, settings.stop_tokens)
    prompts = prompts_of(settings, tokenizer)
    model = load_model(model_folder, settings.tp, settings.pp, settings.dtype, world_size, base=settings.base)
    generator = Generator(model, settings.max_slots, follow=progress(settings, rank, world_size))
    writer = Writer(generator, tokenizer, settings, left_out)
    drafts = writer.drafts(prompts, read_principles(settings.principles, "--principles"), settings.rounds)
    num_answers = len(drafts)
    for number in range(settings.rounds):
        drafts = writer.after_round(drafts, number)
    kept = [draft for draft in drafts if settings.keep_cut or not draft.is_cut]
    left_out["cut_revisions"] += len(drafts) - len(kept)
    without, counts = told(left_out)
    sentence = f"{len(kept)} revised answers of {num_answers}; {without}: {settings.out}"
    if not kept:
        raise DataError(f"no revised answer is left: {sentence}")
    if rank == 0:
        write_rows(settings.out, [draft.row() for draft in kept])
    return Summary(sentence, {"num_answers": num_answers, "num_revised": len(kept), **counts, "out": settings.out})
