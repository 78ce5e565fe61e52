"""Everything that can be known to be wrong before a device, a process group or a weight is touched, in one list."""

from functools import partial
from pathlib import Path

from megarlhf.config.check import violations as setting_violations
from megarlhf.config.settings import PPORun
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.errors import ConfigError
from megarlhf.loop.roles import Role, architectures, attempt, roles
from megarlhf.models.architecture import Architecture, layout_violations
from megarlhf.rewards.remote import read_token
from megarlhf.rewards.sources import check_spec


def preflight(settings: PPORun, world_size: int, command: str = "ppo FILE.yaml") -> list[str]:
    """Violations of the settings, a sentence each; an empty list lets the run begin.

    `command` completes the launch command that is suggested when the number of ranks is wrong.
    """
    found = setting_violations(settings, world_size, command)
    if not settings.actor.model:
        return found
    cast = roles(settings)
    models = architectures(cast, found)
    for name, architecture in models.items():
        found += layout_violations(architecture, cast[name].layout, cast[name].setting)
        found += _head_violations(cast[name], architecture)
    found += _reference_violations(settings, models)
    found += _tokenizer_violations(cast, models)
    found += _length_violations(settings, models)
    found += _reward_violations(settings)
    found += _file_violations(settings)
    return list(dict.fromkeys(found))


def _head_violations(role: Role, architecture: Architecture) -> list[str]:
    if role.head == "vocabulary" and architecture.num_labels:
        return [
            f"actor.model: {role.folder} is a SequenceClassification model, it cannot generate; give a causal language "
            "model"
        ]
    if role.name == "reward" and not architecture.num_labels:
        return [
            f"reward.model: {role.folder} is a language model without a score head; give a SequenceClassification "
            "model with one label"
        ]
    return []


def _reference_violations(settings: PPORun, models: dict[str, Architecture]) -> list[str]:
    if not settings.reference.model or "actor" not in models:
        return []
    found: list[str] = []
    reference = attempt(partial(Architecture.from_folder, settings.reference.model), found, "reference.model")
    if reference is not None and reference != models["actor"]:
        found.append(
            f"reference.model: {settings.reference.model} is of another architecture than actor.model; the reference "
            "shares the actor's module, so give a model of the same sizes"
        )
    return found


def _tokenizer_violations(cast: dict[str, Role], models: dict[str, Architecture]) -> list[str]:
    """Sequences are scored as the ids that were sampled, so every role must mean the same by an id."""
    found: list[str] = []
    tokenizers = {}
    for folder in dict.fromkeys(role.folder for role in cast.values()):
        if folder == cast["actor"].folder or (Path(folder) / "tokenizer_config.json").exists():
            tokenizers[folder] = attempt(partial(Tokenizer, folder), found, "actor.model")
    actor = tokenizers.get(cast["actor"].folder)
    if actor is not None and "actor" in models and actor.vocab_size > models["actor"].vocab_size:
        found.append(
            f"actor.model: the tokenizer has {actor.vocab_size} ids, the model only {models['actor'].vocab_size} rows; "
            "use the tokenizer that belongs to the model"
        )
    for name in ("critic", "reward"):
        other = tokenizers.get(cast[name].folder) if name in cast else None
        if actor is not None and other is not None and other.fingerprint != actor.fingerprint:
            found.append(
                f"{name}.model: the tokenizer of {cast[name].folder} differs from the actor's, so its ids mean other "
                "tokens; use models that share a tokenizer"
            )
        if name in models and "actor" in models and models[name].vocab_size < models["actor"].vocab_size:
            found.append(
                f"{name}.model: {models[name].vocab_size} vocabulary rows cannot read the actor's "
                f"{models['actor'].vocab_size} ids; use models that share a tokenizer"
            )
    return found


def _length_violations(settings: PPORun, models: dict[str, Architecture]) -> list[str]:
    longest = settings.data.max_prompt_tokens + settings.rollout.max_new_tokens
    return [
        f"{name}.model: sequences of up to {longest} tokens (data.max_prompt_tokens {settings.data.max_prompt_tokens} "
        f"+ rollout.max_new_tokens {settings.rollout.max_new_tokens}) exceed its {model.max_positions} positions; "
        "lower one"
        for name, model in models.items()
        if name != "generator" and longest > model.max_positions
    ]


def _reward_violations(settings: PPORun) -> list[str]:
    found: list[str] = []
    checks = [partial(check_spec, spec) for spec in settings.reward.functions]
    for check in [*checks, partial(read_token, "reward.token_file", settings.reward.token_file)]:
        try:
            check()
        except ConfigError as problem:
            found += problem.violations
    return found


def _file_violations(settings: PPORun) -> list[str]:
    found = []
    prompts, folder = Path(settings.data.prompts), Path(settings.run.dir)
    if settings.data.prompts and not prompts.is_file():
        found.append(f"data.prompts: {prompts.absolute()} is not a file; give a JSONL file of prompts")
    if (folder / "metrics.jsonl").exists() and not settings.run.overwrite:
        found.append(
            f"run.dir: {folder} already holds a run; choose another folder, or set run.overwrite to true to start "
            "afresh"
        )
    if folder.exists() and not folder.is_dir():
        found.append(f"run.dir: {folder} is a file; choose a folder")
    return found
