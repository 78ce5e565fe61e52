"""`megarlhf eval`: how well a model's answers are liked, and how often they are liked better than another model's."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarlhf.config.answers import Answers
from megarlhf.config.layout import Layout
from megarlhf.config.settings import Reward
from megarlhf.errors import CheckpointError, ConfigError
from megarlhf.loop.inference import (
    Summary,
    answers_violations,
    launch,
    load_model,
    load_tokenizer,
    policy_violations,
    progress,
    prompts_of,
    requests_for,
    sampling,
    tokenizer_violations,
    write_rows,
)

SUMMARY = "mean reward and win rate: megarlhf eval MODEL_DIR [OTHER_DIR] --rm DIR --prompts FILE --out FILE [--flags]"


@dataclass(frozen=True)
class EvalRun(Answers):
    """Settings of `megarlhf eval MODEL_DIR [OTHER_DIR]`; both answer the same prompts with the same noise."""

    out: str = ""
    """JSONL file to write: one line per prompt and sample, with id, sample, prompt, response, score, tokens, finished,
    and the other model's as other_response, other_score, ..."""
    result: str = ""
    """JSON file for the figures; empty: they are printed only."""
    other: str = ""
    """Folder of the model to compare with, as OTHER_DIR."""
    other_base: str = ""
    """As `base`, for OTHER_DIR."""
    rm: str = ""
    """Folder of a reward model; it reads texts where its tokenizer is another one than the model's."""
    attribute_weights: tuple[float, ...] = ()
    """Of a reward model with several labels: the weight of each."""
    normalise: bool = True
    """Normalise the reward model's scores by the mean and deviation in its config.json, where there are some."""
    functions: tuple[str, ...] = ()
    """Reward functions: builtin names, module:function, or addresses of servers (http://HOST:PORT/score)."""
    weights: tuple[float, ...] = ()
    """Weight of the reward model, when there is one, and of each function; empty: 1 each."""
    token_file: str = ""
    """File with the token that servers ask for."""
    tie_margin: float = 0.0
    """Scores that differ by at most this are a tie."""
    micro_batch_tokens: int = 4096
    """Tokens packed into one micro-batch of the reward model."""

    @property
    def reward(self) -> Reward:
        """As a training command would be told."""
        return Reward(
            model=self.rm,
            functions=self.functions,
            weights=self.weights,
            attribute_weights=self.attribute_weights,
            normalise=self.normalise,
            token_file=self.token_file,
        )


def main(argv: Sequence[str]) -> int:
    """Runs the command on every rank of the launch; returns the exit code."""
    words = list(argv)
    if len(words) > 1 and not words[0].startswith("-") and not words[1].startswith("-"):
        words[1:2] = ["--other", words[1]]
    return launch("eval", EvalRun, require_valid, run_eval, words)


def require_valid(model: str, settings: EvalRun, world_size: int) -> None:
    """Raises ConfigError with everything that can be known to be wrong before a rank is joined or weights are read."""
    violations = answers_violations("eval", model, settings, world_size)
    is_cut = settings.tp > 0 and settings.pp > 0
    if settings.other and is_cut:
        violations += policy_violations("OTHER_DIR", settings.other, settings, settings.other_base)
    if settings.rm and is_cut:
        violations += _judge_violations(settings)
    violations += _source_violations(settings)
    violations += _result_violations(settings)
    if settings.micro_batch_tokens < 1:
        violations.append(f"--micro_batch_tokens {settings.micro_batch_tokens}: use 1 or more")
    if settings.tie_margin < 0:
        violations.append(f"--tie_margin {settings.tie_margin}: use 0 or more")
    if violations:
        raise ConfigError(violations)


def _result_violations(settings: EvalRun) -> list[str]:
    """What would be found out only once everything is sampled and scored."""
    place = Path(settings.result).resolve()
    if not settings.result:
        return []
    if not place.parent.is_dir():
        return [f"--result: folder {place.parent} does not exist; make it first"]
    if place.is_dir():
        return [f"--result: {place} is a folder; name a file"]
    if settings.out and place == Path(settings.out).resolve():
        return [f"--result: {place} is --out too; name another file"]
    return []


def _judge_violations(settings: EvalRun) -> list[str]:
    from megarlhf.models.architecture import Architecture, layout_violations
    from megarlhf.models.score_config import score_rule, weight_violations

    try:
        architecture = Architecture.from_folder(settings.rm)
        if not architecture.num_labels:
            return [f"--rm: {settings.rm} has no score head; give a reward model's folder, such as megarlhf rm makes"]
        found = weight_violations(architecture, settings.attribute_weights, "--attribute_weights", settings.rm)
        if not found:
            score_rule(settings.rm, settings.attribute_weights, normalise=settings.normalise)
    except (ConfigError, CheckpointError) as error:
        return [f"--rm: {error}"]
    found += layout_violations(architecture, Layout(tp=settings.tp, pp=settings.pp), "--rm")
    return found or tokenizer_violations("--rm", settings.rm)


def _source_violations(settings: EvalRun) -> list[str]:
    from megarlhf.rewards.remote import read_token
    from megarlhf.rewards.sources import check_spec

    found = []
    num_sources = bool(settings.rm) + len(settings.functions)
    if not num_sources:
        found.append(
            "--rm: neither --rm nor --functions is given; name a reward model's folder, or --functions sentiment"
        )
    elif settings.weights and len(settings.weights) != num_sources:
        found.append(
            f"--weights: {len(settings.weights)} weights for {num_sources} sources; give {num_sources} or none"
        )
    for spec in settings.functions:
        try:
            check_spec(spec)
        except ConfigError as error:
            found += [f"--functions: {violation}" for violation in error.violations]
    try:
        read_token("--token_file", settings.token_file)
    except ConfigError as error:
        found += error.violations
    return found


def run_eval(model_folder: str, settings: EvalRun, rank: int, world_size: int) -> Summary:
    """Samples from one model after the other, scores, and writes on rank 0. Collective over the world, which is joined.

    Raises DataError where an answer cannot be read by the reward model, RewardError where a function fails.
    """
    from megarlhf.data.tokenizer import Tokenizer
    from megarlhf.loop.evaluation import Answered, TextJudge, rows_of, table
    from megarlhf.loop.scoring import reward_scores
    from megarlhf.loop.serving import Served
    from megarlhf.models.score_config import score_rule

    folders = [(model_folder, settings.base)] + [(settings.other, settings.other_base)] * bool(settings.other)
    answered = [_answers(folder, base, settings, world_size) for folder, base in folders]
    served = None
    if settings.rm:
        rule = score_rule(settings.rm, settings.attribute_weights, normalise=settings.normalise)
        judge = load_model(settings.rm, settings.tp, settings.pp, settings.dtype, world_size, "value")
        served = Served("reward", judge, Tokenizer(settings.rm), settings.micro_batch_tokens, 2**31, rule)
    models = []
    for (folder, _), (batch, tokenizer) in zip(folders, answered, strict=True):
        scorer = TextJudge(served, tokenizer) if served else None
        scored = reward_scores(settings.reward, scorer, tokenizer, lambda metrics: None).annotate(batch)
        models.append(Answered(folder, scored, settings.samples_per_prompt))
    sentence, numbers = table(models, settings.tie_margin)
    if rank == 0:
        write_rows(settings.out, rows_of(models, lambda row: models[0].batch.metadata[row]["id"]))
        if settings.result:
            Path(settings.result).write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return Summary(f"{sentence}\ntexts: {settings.out}", {**numbers, "out": settings.out})


def _answers(folder: str, base: str, settings: EvalRun, world_size: int):
    """(a row for every prompt and sample, the tokenizer's fingerprint); the model's memory is free again."""
    from megarlhf.engines.generator import Generator
    from megarlhf.loop.rollouts import experience_of
    from megarlhf.records.prompts import siblings

    tokenizer = load_tokenizer(folder, base, settings.stop_tokens)
    prompts = prompts_of(settings, tokenizer)
    model = load_model(folder, settings.tp, settings.pp, settings.dtype, world_size, base=base)
    follow = progress(settings, model.groups.rank, world_size)
    generator = Generator(model, settings.max_slots, follow=follow)
    requests = requests_for(prompts, settings.samples_per_prompt)
    completions = generator.sample(requests, sampling(settings, tokenizer.stop_ids))
    batch = experience_of(siblings(prompts, settings.samples_per_prompt), completions, tokenizer)
    return batch, tokenizer.fingerprint
