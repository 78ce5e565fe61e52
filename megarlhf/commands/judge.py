"""`megarlhf judge`: preferences by AI feedback. A policy answers, a judge model compares the answers in pairs."""

import logging
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
    model_violations,
    principles_violations,
    progress,
    prompts_of,
    requests_for,
    sampling,
    tokenizer_violations,
    told,
    write_rows,
)

SUMMARY = "preferences from a judge model: megarlhf judge MODEL_DIR --prompts FILE.jsonl --out FILE.jsonl [--flags]"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JudgeRun(Answers):
    """Settings of `megarlhf judge`: MODEL_DIR answers, and --judge compares its answers to a prompt, all pairs."""

    out: str = ""
    """JSONL file to write, which rm and dpo read: one line per preference, with id, prompt, chosen, rejected, margin
    (P(chosen is better) - P(rejected is better)) and the principles asked about."""
    samples_per_prompt: int = 2
    """Answers per prompt; equal ones count once."""
    judge: str = ""
    """Folder of the model that compares; empty: MODEL_DIR itself."""
    principles: str = ""
    """Text file with one principle a line; empty: megarlhf/data/constitution.txt."""
    principles_per_pair: int = 1
    """Principles drawn for each pair; their verdicts are averaged."""
    min_gap: float = 0.1
    """A pair whose margin is smaller is left out; 0 keeps every pair that is not a tie."""
    keep_cut: bool = False
    """Keep answers that were cut at max_new_tokens. Whoever learns from the file takes them for whole."""
    micro_batch_tokens: int = 4096
    """Tokens packed into one micro-batch of the judge."""


def main(argv: Sequence[str]) -> int:
    """Runs the command on every rank of the launch; returns the exit code."""
    return launch("judge", JudgeRun, require_valid, run_judge, argv)


def require_valid(model: str, settings: JudgeRun, world_size: int) -> None:
    """Raises ConfigError with everything that can be known to be wrong before a rank is joined or weights are read."""
    violations = answers_violations("judge", model, settings, world_size)
    if settings.judge and settings.tp > 0 and settings.pp > 0:
        found = model_violations("--judge", settings.judge, settings.tp, settings.pp)
        violations += found or tokenizer_violations("--judge", settings.judge)
    violations += principles_violations(settings.principles, "principles_per_pair", settings.principles_per_pair)
    if settings.samples_per_prompt == 1:
        violations.append("--samples_per_prompt 1: use 2 or more; a preference needs two answers")
    if settings.temperature == 0:
        violations.append("--temperature 0.0: all answers to a prompt would be equal; use more than 0")
    if not 0 <= settings.min_gap < 1:
        violations.append(f"--min_gap {settings.min_gap}: use 0 to less than 1")
    if settings.micro_batch_tokens < 1:
        violations.append(f"--micro_batch_tokens {settings.micro_batch_tokens}: use 1 or more")
    if violations:
        raise ConfigError(violations)


def run_judge(model_folder: str, settings: JudgeRun, rank: int, world_size: int) -> Summary:
    """Samples, compares, and writes the file on rank 0. Collective over the world, which is joined.

    Raises DataError when no preference is left.
    """
    from megarlhf.data.principles import read_principles
    from megarlhf.data.questions import prompt_as_written
    from megarlhf.data.tokenizer import Tokenizer
    from megarlhf.engines.choices import ChoiceScorer
    from megarlhf.engines.generator import Generator
    from megarlhf.loop.judging import pairs_of, verdict

    left_out: Counter[str] = Counter()
    tokenizer = load_tokenizer(model_folder, settings.base, settings.stop_tokens)
    prompts = prompts_of(settings, tokenizer)
    judge_tokenizer = Tokenizer(settings.judge) if settings.judge else tokenizer
    model = load_model(model_folder, settings.tp, settings.pp, settings.dtype, world_size, base=settings.base)
    generator = Generator(model, settings.max_slots, follow=progress(settings, rank, world_size))
    requests = requests_for(prompts, settings.samples_per_prompt)
    completions = generator.generate(requests, sampling(settings, tokenizer.stop_ids))
    answers = _answers(completions, tokenizer, settings, left_out)
    if settings.judge:
        del generator, model  # one of the two models at a time
        model = load_model(settings.judge, settings.tp, settings.pp, settings.dtype, world_size)
    principles = read_principles(settings.principles, "--principles")
    pairs = pairs_of(prompts, answers, principles, settings.principles_per_pair, settings.seed)
    asked = _that_fit(pairs, judge_tokenizer, model.architecture.max_positions, left_out)
    logps = ChoiceScorer(model, settings.micro_batch_tokens).logps([one for _, choices in asked for one in choices])
    width = 2 * settings.principles_per_pair
    verdicts = [verdict(logps[at : at + width]) for at in range(0, len(logps), width)]
    rows = [
        {"id": pair.prompt.metadata["id"], "prompt": prompt_as_written(pair.prompt), **found.preference(pair)}
        for (pair, _), found in zip(asked, verdicts, strict=True)
        if abs(found.gap) >= settings.min_gap and found.gap
    ]
    left_out["unclear_pairs"] = len(verdicts) - len(rows)
    summary = _summary(settings, len(completions), verdicts, len(rows), left_out)
    if not rows:
        raise DataError(f"no preference is left: {summary.sentence}")
    if rank == 0:
        write_rows(settings.out, rows)
        _warn(float(summary.numbers["letter_mass"]))
    return summary


def _answers(completions, tokenizer, settings: JudgeRun, left_out: Counter[str]) -> list[list[str]]:
    """The texts that can be compared, for each prompt: ended by themselves, not blank, all different."""
    answers = []
    for at in range(0, len(completions), settings.samples_per_prompt):
        texts: list[str] = []
        for one in completions[at : at + settings.samples_per_prompt]:
            text = tokenizer.decode(one.token_ids)
            if one.finish_reason == "length" and not settings.keep_cut:
                left_out["cut_answers"] += 1
            elif not text.strip():
                left_out["blank_answers"] += 1
            elif text in texts:
                left_out["equal_answers"] += 1
            else:
                texts.append(text)
        answers.append(texts)
    return answers


def _that_fit(pairs, tokenizer, max_positions: int, left_out: Counter[str]) -> list:
    """The pairs with their questions, without those that are longer than the judge reads."""
    asked = [(pair, pair.questions(tokenizer)) for pair in pairs]
    fitting = [pair for pair in asked if all(len(choice.context_ids) <= max_positions for choice in pair[1])]
    left_out["too_long_pairs"] = len(asked) - len(fitting)
    return fitting


def _summary(
    settings: JudgeRun, num_answers: int, verdicts: Sequence, num_rows: int, left_out: Counter[str]
) -> Summary:
    means = {
        name: sum(vars(one)[name] for one in verdicts) / max(1, len(verdicts))
        for name in ("agreement", "first_letter", "letter_mass")
    }
    without, counts = told(left_out)
    sentence = (
        f"{num_rows} preferences from {len(verdicts)} pairs of {num_answers} answers; {without}; "
        f"orders agree {means['agreement']:.2f}, P(A) {means['first_letter']:.2f}, letters' probability "
        f"{means['letter_mass']:.3f}: {settings.out}"
    )
    numbers = {"num_answers": num_answers, "num_pairs": len(verdicts), "num_preferences": num_rows}
    return Summary(sentence, {**numbers, **counts, **means, "out": settings.out})


def _warn(letter_mass: float) -> None:
    if letter_mass < 0.5:
        log.warning(
            "the judge gives the letters A and B %.3f of its probability: it would rather say something else, and its "
            "preferences may mean little",
            letter_mass,
        )
