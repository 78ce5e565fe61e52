"""What can be said to be wrong with settings before any model, file or device is touched: ranges and arithmetic.

Each check gives sentences that name the setting, the value, what is accepted and, where there is one, a value to use.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megarlhf.config.algorithm_check import algorithm_violations, algorithm_warnings, horizon_violations
from megarlhf.config.corpus import corpus_violations, negatives_violations
from megarlhf.config.fields import dotted_names
from megarlhf.config.layout import Layout
from megarlhf.config.lora import lora_violations
from megarlhf.config.precision import FP8, precision_violations
from megarlhf.config.residency import residency_violations, view_violations
from megarlhf.config.runs import AnyRun, OnlineRun, PPORun, RewardModelRun, SFTRun
from megarlhf.config.settings import Actor, Critic, Reward, Trainee
from megarlhf.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Which numbers a setting takes, as a test and in words."""

    holds: Callable[[Any], bool]
    words: str


POSITIVE = Range(lambda value: value > 0, "more than 0")
NOT_NEGATIVE = Range(lambda value: value >= 0, "0 or more")
AT_LEAST_ONE = Range(lambda value: value >= 1, "1 or more")
FRACTION = Range(lambda value: 0 <= value <= 1, "between 0 and 1")
DECAY = Range(lambda value: 0 <= value < 1, "at least 0 and below 1")
SEED = Range(lambda value: 0 <= value < 2**63, "at least 0 and below 2^63")
PROBABILITY = Range(lambda value: 0 < value <= 1, "more than 0 and at most 1")
STEPS = Range(lambda value: all(step >= 1 for step in value), "made of steps from 1 on")

OPTIMIZER_RANGES = {
    "learning_rate": POSITIVE,
    "min_learning_rate": NOT_NEGATIVE,
    "warmup_updates": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "beta1": DECAY,
    "beta2": DECAY,
    "epsilon": POSITIVE,
    "clip_grad": NOT_NEGATIVE,
}

RANGES = {
    **dict.fromkeys(("actor.balance_coef", "critic.balance_coef", "reward.balance_coef"), NOT_NEGATIVE),
    "actor.micro_batch_tokens": AT_LEAST_ONE,
    "critic.micro_batch_tokens": AT_LEAST_ONE,
    "reward.micro_batch_tokens": AT_LEAST_ONE,
    "reference.timeout_s": POSITIVE,
    "reference.retries": NOT_NEGATIVE,
    "reference.request_rows": AT_LEAST_ONE,
    "reward.timeout_s": POSITIVE,
    "reward.retries": NOT_NEGATIVE,
    "reward.request_rows": AT_LEAST_ONE,
    "rollout.batch_size": AT_LEAST_ONE,
    "rollout.samples_per_prompt": AT_LEAST_ONE,
    "rollout.max_new_tokens": AT_LEAST_ONE,
    "rollout.min_new_tokens": NOT_NEGATIVE,
    "rollout.temperature": POSITIVE,
    "rollout.top_k": NOT_NEGATIVE,
    "rollout.top_p": PROBABILITY,
    "rollout.max_slots": AT_LEAST_ONE,
    "rollout.shards": AT_LEAST_ONE,
    "rollout.extra_rounds": NOT_NEGATIVE,
    "rollout.max_logp_gap": NOT_NEGATIVE,
    "actor.average_decay": DECAY,
    "reference.follow_rate": FRACTION,
    "pretraining.coef": NOT_NEGATIVE,
    "residency.device_gib": NOT_NEGATIVE,
    "data.max_prompt_tokens": AT_LEAST_ONE,
    "data.max_bad_share": FRACTION,
    "statistics.max_examples": NOT_NEGATIVE,
    "run.seed": SEED,
    "run.steps": AT_LEAST_ONE,
    "run.save_every": NOT_NEGATIVE,
    "run.checkpoint_every": NOT_NEGATIVE,
    "run.keep_checkpoints": NOT_NEGATIVE,
    "run.keep_capsules": NOT_NEGATIVE,
    "run.save_before_minutes": NOT_NEGATIVE,
    "run.stage_timeout_minutes": NOT_NEGATIVE,
    "run.sample_texts": NOT_NEGATIVE,
    "run.profile": STEPS,
    **{
        f"{model}.optimizer.{name}": wanted
        for model in ("actor", "critic", "reward")
        for name, wanted in OPTIMIZER_RANGES.items()
    },
}
"""Of every command; those of sections that a command does not have are left aside. The sections `algorithm`, `data` of
a data set and `negatives` have checks of their own."""


CORPUS_RANGES = RANGES | {"run.steps": NOT_NEGATIVE}
"""Of the commands over a data set."""


def violations(settings: AnyRun, world_size: int | None = None, command: str = "ppo FILE.yaml") -> list[str]:
    """Everything wrong that needs no model: ranges, layouts, batch arithmetic and, given `world_size`, the launch.

    `command` completes the launch command that is suggested when the number of ranks is wrong.
    """
    samples = settings.rollout.samples_per_prompt if isinstance(settings, OnlineRun) else 0
    found = [*_ranges(settings), *algorithm_violations(settings.algorithm, samples), *_layouts(settings)]
    is_in_range = not found
    found += [*_paths(settings), *_adapters(settings), *_precisions(settings)]
    found += _reward_sources(settings.reward) if isinstance(settings, OnlineRun) else []
    found += _launch(settings, world_size, command) if world_size and _have_sizes(settings) else []
    if is_in_range:  # the arithmetic below divides by these numbers
        found += [*_learning_rates(settings), *_profiled(settings)]
        found += _consistency(settings) if isinstance(settings, OnlineRun) else []
        if world_size and not found and isinstance(settings, OnlineRun):
            found += _batches(settings, world_size)
    return found


def warnings(settings: AnyRun) -> list[str]:
    """What is allowed and will hardly do what was meant, a sentence each."""
    run, found = settings.run, algorithm_warnings(settings.algorithm)
    # The last checkpoint is one that no step began at.
    if run.checkpoint_every and 0 < run.keep_checkpoints <= run.keep_capsules:
        found.append(
            f"run.keep_capsules: {run.keep_capsules}, but a capsule goes with the checkpoint that its step began at, "
            f"and run.keep_checkpoints keeps {run.keep_checkpoints}; set that to {run.keep_capsules + 1} or more, or "
            "to 0 for all"
        )
    return found


def require_valid(settings: AnyRun, world_size: int | None = None, command: str = "ppo FILE.yaml") -> None:
    """Raises ConfigError with all `violations`."""
    found = violations(settings, world_size, command)
    if found:
        raise ConfigError(found)


def layouts(settings: AnyRun) -> dict[str, Layout]:
    """The layout of each model under its setting's name, with the defaults that settings.py states filled in."""
    if isinstance(settings, RewardModelRun):
        return {"reward.train": settings.reward.train}
    found = {"actor.train": settings.actor.train}
    if not isinstance(settings, OnlineRun):
        return found
    found["actor.generate"] = settings.actor.generate
    judge = settings.actor.train
    if isinstance(settings, PPORun):
        found["critic.train"] = judge = settings.critic.train or settings.actor.train
    if settings.reward.model:
        found["reward.train"] = settings.reward.train or judge
    return found


def ranks_needed(settings: AnyRun) -> int:
    """The fewest ranks that hold whole copies of every model."""
    return math.lcm(*(layout.smallest_world for layout in layouts(settings).values()))


def launch_command(num_ranks: int, command: str) -> str:
    """How to start `command` on `num_ranks` ranks of one machine."""
    return f"torchrun --nproc-per-node {num_ranks} -m megarlhf {command}"


def _value_at(settings: AnyRun, name: str) -> Any:
    value: Any = settings
    for part in name.split("."):
        section = vars(value)
        value = section[part] if part in section else section[part + "_"]
    return value


def _ranges(settings: AnyRun) -> Iterator[str]:
    names = set(dotted_names(type(settings)))
    for name, wanted in (RANGES if isinstance(settings, OnlineRun) else CORPUS_RANGES).items():
        value = _value_at(settings, name) if name in names else None
        if name in names and not wanted.holds(value):
            yield f"{name}: {value} is out of range; choose a value that is {wanted.words}"


def _layouts(settings: AnyRun) -> Iterator[str]:
    for name, layout in layouts(settings).items():
        sizes = ["tp", "pp", "cp", "ep", "vp"]
        wrong = [size for size in sizes if vars(layout)[size] < 1]
        yield from (f"{name}.{size}: {vars(layout)[size]} is out of range; choose 1 or more" for size in wrong)
        if layout.sp and layout.tp == 1:
            yield f"{name}.sp: sequence parallelism needs tp > 1, and tp is 1; set sp to false or tp to 2 or more"
        if layout.vp > 1 and layout.pp == 1:
            yield f"{name}.vp: {layout.vp} virtual stages need pp > 1, and pp is 1; set vp to 1 or pp to 2 or more"
        yield from _uneven_stages(name, layout)
        if name == "actor.generate" and (layout.sp or layout.vp > 1 or layout.cp > 1):
            yield f"{name}: sp, vp and cp serve training only; leave sp false, vp 1 and cp 1"
        if name == "actor.generate" and not wrong and layout.tp % layout.ep:
            yield (
                f"{name}.ep: {layout.ep} does not divide tp {layout.tp}: copies of the model decode on their own, so "
                "each must hold all experts; choose an ep that divides tp"
            )


def _uneven_stages(name: str, layout: Layout) -> Iterator[str]:
    for size in ("first_stage_layers", "last_stage_layers"):
        value = vars(layout)[size]
        if value < 0:
            yield f"{name}.{size}: {value} is out of range; choose 0 (a share like the others') or more"
        elif value and (layout.pp == 1 or layout.vp > 1):
            yield f"{name}.{size}: {value} needs pp > 1 and vp 1, found pp {layout.pp}, vp {layout.vp}; set it to 0"


def _have_sizes(settings: AnyRun) -> bool:
    """Every layout is cut at least one way, so that ranks can be counted."""
    return all(min(layout.tp, layout.pp, layout.cp, layout.ep) >= 1 for layout in layouts(settings).values())


def _paths(settings: AnyRun) -> Iterator[str]:
    needed = ["reward.model" if isinstance(settings, RewardModelRun) else "actor.model"]
    needed += ["data.prompts"] if isinstance(settings, OnlineRun) else []
    yield from (f"{name}: is not set; give a path" for name in needed if not _value_at(settings, name))
    if not isinstance(settings, OnlineRun):
        yield from corpus_violations(settings.data, "data")
    if isinstance(settings, RewardModelRun):
        yield from negatives_violations(settings.negatives, "negatives")
        yield from _reward_modelling(settings)


def _reward_modelling(settings: RewardModelRun) -> Iterator[str]:
    """Scored answers stand alone: nothing is compared, so there is no best answer and no point of divergence."""
    if settings.algorithm.loss != "regression":
        return
    if settings.negatives.share:
        yield f"negatives.share: {settings.negatives.share} needs algorithm.loss preference; set it to 0"
    if settings.algorithm.read_at == "divergence":
        yield "algorithm.read_at: divergence is where compared answers part; choose last with loss regression"


def _learning_rates(settings: AnyRun) -> Iterator[str]:
    """Every trained model has an optimizer."""
    for name, section in vars(settings).items():
        if not isinstance(section, Trainee | Critic):
            continue
        optimizer = section.optimizer
        if optimizer.min_learning_rate > optimizer.learning_rate:
            yield (
                f"{name}.optimizer.min_learning_rate: {optimizer.min_learning_rate} is more than learning_rate "
                f"{optimizer.learning_rate}; choose {optimizer.learning_rate} or less"
            )


def _profiled(settings: AnyRun) -> Iterator[str]:
    last = settings.run.steps
    if too_late := [step for step in settings.run.profile if last and step > last]:
        yield f"run.profile: step {too_late[0]} is beyond run.steps {last}; choose steps from 1 to {last}"


def _adapters(settings: AnyRun) -> Iterator[str]:
    """Adapters, and what goes with a reference that is the model without them."""
    for name, section in vars(settings).items():
        if isinstance(section, Trainee | Critic):
            yield from lora_violations(section.lora, f"{name}.lora")
    if isinstance(settings, SFTRun | RewardModelRun) or not settings.actor.lora.rank:
        return
    for name, value in (("model", settings.reference.model), ("follow_rate", settings.reference.follow_rate)):
        if value:
            yield (
                f"reference.{name}: {value} and actor.lora.rank {settings.actor.lora.rank}: with adapters the "
                f"reference is the actor's own model without them; leave reference.{name} out, or set actor.lora.rank "
                "to 0"
            )


def _precisions(settings: AnyRun) -> Iterator[str]:
    for name, section in vars(settings).items():
        if not isinstance(section, Trainee | Critic | Reward):
            continue
        yield from precision_violations(section.layers, recipes_of(section, name), name)


def te_recipes(settings: AnyRun) -> dict[str, dict[str, FP8]]:
    """The FP8 settings of the models with layers of Transformer Engine, by section and their own names."""
    return {
        name: recipes_of(section, name)
        for name, section in vars(settings).items()
        if isinstance(section, Trainee | Critic | Reward) and section.layers == "te"
    }


def recipes_of(section: Trainee | Critic | Reward, name: str) -> dict[str, FP8]:
    """The FP8 settings of the model in section `name`, by their own names."""
    recipes = {f"{name}.fp8": section.fp8}
    if isinstance(section, Actor) and section.generate_fp8 is not None:
        recipes[f"{name}.generate_fp8"] = section.generate_fp8
    return recipes


def _consistency(settings: OnlineRun) -> Iterator[str]:
    rollout = settings.rollout
    yield from residency_violations(settings.residency, follows=settings.reference.follow_rate > 0)
    if settings.residency.generator == "view":
        actor = settings.actor
        is_one = actor.generate_fp8 in (None, actor.fp8)
        yield from view_violations(actor.train, actor.generate, actor.lora.rank, is_one_precision=is_one)
    if isinstance(settings, PPORun) and settings.pretraining.coef:
        yield from corpus_violations(settings.pretraining, "pretraining")
    warmup = settings.algorithm.critic_warmup_steps if isinstance(settings, PPORun) else 0
    if warmup >= settings.run.steps:
        yield (
            f"algorithm.critic_warmup_steps: {warmup} of run.steps {settings.run.steps} leave none for the policy; "
            f"choose {settings.run.steps - 1} or less"
        )
    if rollout.extra_rounds and rollout.samples_per_prompt == 1:
        yield (
            f"rollout.extra_rounds: {rollout.extra_rounds} with samples_per_prompt 1: a single response carries no "
            "signal of its own; choose samples_per_prompt 2 or more, or extra_rounds 0"
        )
    if rollout.min_new_tokens > rollout.max_new_tokens:
        yield (
            f"rollout.min_new_tokens: {rollout.min_new_tokens} is more than rollout.max_new_tokens "
            f"{rollout.max_new_tokens}; choose {rollout.max_new_tokens} or less"
        )
    rows = rollout.batch_size * rollout.samples_per_prompt
    yield from horizon_violations(settings.algorithm, rows)
    if rollout.shards > 1:
        yield from _shards(settings)
    if rows < settings.algorithm.num_minibatches:
        yield (
            f"algorithm.num_minibatches: {settings.algorithm.num_minibatches} minibatches cannot be made of {rows} "
            f"rows (rollout.batch_size {rollout.batch_size} * samples_per_prompt {rollout.samples_per_prompt}); "
            f"choose {rows} or less"
        )


def _shards(settings: OnlineRun) -> Iterator[str]:
    rollout, num_minibatches = settings.rollout, settings.algorithm.num_minibatches
    if rollout.extra_rounds:
        yield (
            f"rollout.shards: {rollout.shards} with rollout.extra_rounds {rollout.extra_rounds}: which groups fill a "
            "batch is decided over all of it; choose shards 1, or extra_rounds 0"
        )
    if rollout.batch_size % rollout.shards:
        yield (
            f"rollout.shards: {rollout.shards} parts of equal size cannot be made of rollout.batch_size "
            f"{rollout.batch_size}; choose a divisor of it"
        )
    elif (rows := rollout.batch_size // rollout.shards * rollout.samples_per_prompt) % num_minibatches:
        yield (
            f"rollout.shards: a part of {rows} rows (rollout.batch_size {rollout.batch_size} * samples_per_prompt "
            f"{rollout.samples_per_prompt} / {rollout.shards}) cannot be cut into algorithm.num_minibatches "
            f"{num_minibatches} of equal size; choose fewer shards, or a larger batch"
        )


def _reward_sources(reward: Reward) -> Iterator[str]:
    num_sources, num_weights = len(reward.functions) + bool(reward.model), len(reward.weights)
    if not num_sources:
        yield "reward: neither reward.model nor reward.functions is set; give one, for example functions: [sentiment]"
    if reward.attribute_weights and not reward.model:
        yield (
            f"reward.attribute_weights: {list(reward.attribute_weights)} combine the labels of reward.model, which is "
            "not set; leave them out, or set it"
        )
    if num_sources and num_weights not in (0, num_sources):
        yield f"reward.weights: {num_weights} weights for {num_sources} sources of reward; give {num_sources} or none"


def _launch(settings: AnyRun, world_size: int, command: str) -> Iterator[str]:
    needed = ranks_needed(settings)
    suggestion = launch_command(needed * max(1, math.ceil(world_size / needed)), command)
    for name, layout in layouts(settings).items():
        if world_size % layout.model_ranks:
            yield (
                f"{name}: tp {layout.tp} * pp {layout.pp} * cp {layout.cp} = {layout.model_ranks} ranks hold one copy "
                f"of the model, which does not divide the {world_size} launched; all models together need a multiple "
                f"of {needed}: {suggestion}"
            )
        elif world_size % layout.smallest_world:
            yield (
                f"{name}.ep: {layout.ep} does not divide the {world_size // layout.pp} ranks of a stage; all models "
                f"together need a multiple of {needed}: {suggestion}"
            )


def _batches(settings: OnlineRun, world_size: int) -> Iterator[str]:
    """Each minibatch is shared equally by the data-parallel ranks of whoever learns from it."""
    rollout, num_minibatches = settings.rollout, settings.algorithm.num_minibatches
    rows = rollout.batch_size * rollout.samples_per_prompt
    learners = [name for name in layouts(settings) if name in ("actor.train", "critic.train")]
    for name in learners:
        dp = layouts(settings)[name].dp(world_size)
        unit = num_minibatches * dp
        if rows % unit:
            step = unit // math.gcd(unit, rollout.samples_per_prompt)
            yield (
                f"rollout.batch_size: {rollout.batch_size} prompts * {rollout.samples_per_prompt} samples_per_prompt = "
                f"{rows} rows cannot be shared equally by algorithm.num_minibatches {num_minibatches} * {dp} "
                f"data-parallel ranks of {name}; choose a multiple of {step}, such as "
                f"{step * math.ceil(rollout.batch_size / step)}"
            )
