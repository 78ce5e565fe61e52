"""Everything that can be known to be wrong before a device, a process group or a weight is touched, in one list."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

from megarlhf.config.check import te_recipes
from megarlhf.config.runs import AnyRun, OnlineRun, RewardModelRun, SFTRun
from megarlhf.config.settings import Reference, Reward
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.device.packages import can_import
from megarlhf.device.transformer_engine import Machine, missing_for_te
from megarlhf.errors import CheckpointError, ConfigError
from megarlhf.loop.disk import room_violations
from megarlhf.loop.first_look import first_look
from megarlhf.loop.remote import address_violations
from megarlhf.loop.resuming import folder_violations
from megarlhf.loop.roles import Role, architectures, attempt, roles
from megarlhf.models.architecture import Architecture
from megarlhf.models.score_config import score_rule, weight_violations
from megarlhf.residency.schedule import homes
from megarlhf.rewards.remote import read_token
from megarlhf.rewards.sources import check_spec
from megarlhf.weights.folder import SafetensorsFolder


def preflight(settings: AnyRun, world_size: int, command: str = "ppo FILE.yaml") -> list[str]:
    """Violations of the settings, a sentence each, those of `first_look` among them; none lets the run begin.

    `command` completes the launch command that is suggested when the number of ranks is wrong.
    """
    found, cast = first_look(settings, world_size, command), roles(settings)
    models = architectures({name: role for name, role in cast.items() if role.folder}, [])
    found += _tokenizer_violations(cast, models)
    found += _weight_violations(cast, models)
    found += _folder_violations(settings)
    found += room_violations(settings, cast, models)
    found += _wandb_violations(settings)
    if isinstance(settings, OnlineRun):
        found += _disk_violations(settings)
        found += _score_violations(settings.reward, models["reward"]) if "reward" in models else []
        found += _reward_violations(settings)
        found += _stop_violations(settings)
    if not isinstance(settings, SFTRun | RewardModelRun):
        found += _reference_violations(settings.reference, models)
    return list(dict.fromkeys(found))


def machine_violations(settings: AnyRun) -> list[str]:
    """What the settings ask of this machine that it does not have, a sentence each."""
    machine = Machine.here()
    return [line for name, recipes in te_recipes(settings).items() for line in missing_for_te(machine, name, recipes)]


def _score_violations(settings: Reward, architecture: Architecture) -> list[str]:
    """Of the reward model: what combines its labels, and what its config.json says of its scores."""
    found = weight_violations(architecture, settings.attribute_weights, "reward.attribute_weights", settings.model)
    rule = partial(score_rule, settings.model, settings.attribute_weights, normalise=settings.normalise)
    attempt(rule, found, "reward.model")
    return found


def _reference_violations(settings: Reference, models: dict[str, Architecture]) -> list[str]:
    if settings.url:
        return address_violations(settings)
    if not settings.model or "actor" not in models:
        return []
    found: list[str] = []
    reference = attempt(partial(Architecture.from_folder, settings.model), found, "reference.model")
    if reference is not None:
        attempt(partial(SafetensorsFolder, settings.model), found, "reference.model")
    if reference is not None and reference != models["actor"]:
        found.append(
            f"reference.model: {settings.model} is of another architecture than actor.model; the reference "
            "shares the actor's module, so give a model of the same sizes"
        )
    return found


def _weight_violations(cast: dict[str, Role], models: dict[str, Architecture]) -> list[str]:
    """Folders whose weights cannot be read, by the headers of their files; once per folder."""
    found: list[str] = []
    seen: set[str] = set()
    for name in models:
        folder = cast[name].folder
        if folder not in seen:
            attempt(partial(SafetensorsFolder, folder), found, f"{'actor' if name == 'generator' else name}.model")
        seen.add(folder)
    return found


def _tokenizer_violations(cast: dict[str, Role], models: dict[str, Architecture]) -> list[str]:
    """Sequences are scored as the ids that were sampled, so every role must mean the same by an id."""
    found: list[str] = []
    first = next(iter(cast.values()))
    tokenizers = {}
    for name, role in cast.items():
        is_needed = role.folder == first.folder or (Path(role.folder) / "tokenizer_config.json").exists()
        if name in models and role.folder not in tokenizers and is_needed:
            tokenizers[role.folder] = attempt(partial(Tokenizer, role.folder), found, f"{name}.model")
    actor = tokenizers.get(first.folder)
    if actor is not None and actor.vocab_size > models[first.name].vocab_size:
        found.append(
            f"{first.name}.model: the tokenizer has {actor.vocab_size} ids, the model only "
            f"{models[first.name].vocab_size} rows; use the tokenizer that belongs to the model"
        )
    for name in [name for name in ("critic", "reward") if name in cast and name != first.name]:
        other = tokenizers.get(cast[name].folder)
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


def _stop_violations(settings: OnlineRun) -> list[str]:
    """Texts that are several tokens; a tokenizer that cannot be loaded is told already."""
    if not settings.rollout.stop_tokens:
        return []
    try:
        Tokenizer(settings.actor.model, settings.rollout.stop_tokens)
    except ConfigError as problem:
        return list(problem.violations)
    except CheckpointError:
        pass
    return []


def _reward_violations(settings: OnlineRun) -> list[str]:
    found: list[str] = []
    checks: list[Callable[[], object]] = [partial(check_spec, spec) for spec in settings.reward.functions]
    checks.append(partial(read_token, "reward.token_file", settings.reward.token_file))
    for check in checks:
        try:
            check()
        except ConfigError as problem:
            found += problem.violations
    return found


def _disk_violations(settings: OnlineRun) -> list[str]:
    """A folder of its own for what waits on disk is made and tried; by default it lies in the run folder."""
    folder = settings.residency.folder
    if not folder or "disk" not in homes(settings).values():
        return []
    return _unwritable("residency.folder", Path(folder))


def _folder_violations(settings: AnyRun) -> list[str]:
    """The folder is made and tried: at the end of a run it would be too late."""
    folder = Path(settings.run.dir)
    if folder.exists() and not folder.is_dir():
        return [f"run.dir: {folder} is a file; choose a folder"]
    found = folder_violations(settings)
    if found:
        return found
    return _unwritable("run.dir", folder)


def _wandb_violations(settings: AnyRun) -> list[str]:
    if settings.run.wandb == "off" or can_import("wandb"):
        return []
    return [
        f"run.wandb: {settings.run.wandb}, and the package wandb is not installed; pip install 'megarlhf[wandb]', or "
        "set run.wandb to off"
    ]


def _unwritable(setting: str, folder: Path) -> list[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return []
    except OSError as problem:
        return [f"{setting}: {folder.absolute()} cannot be written: {problem.strerror}; choose another folder"]
