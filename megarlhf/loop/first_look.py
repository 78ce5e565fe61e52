"""What settings, config.json files and paths say against a run: told within a second, before torch is imported."""

import re
from collections.abc import Mapping
from pathlib import Path

from megarlhf.config.check import violations as setting_violations
from megarlhf.config.runs import AnyRun, OnlineRun, PPORun, RewardModelRun
from megarlhf.config.settings import Critic, Trainee
from megarlhf.data.files import HUB
from megarlhf.loop.model_rules import model_violations
from megarlhf.loop.roles import Role, architectures, roles
from megarlhf.models.architecture import Architecture
from megarlhf.models.precision.linears import te_violations


def first_look(settings: AnyRun, world_size: int, command: str = "ppo FILE.yaml") -> list[str]:
    """Violations, a sentence each, which `preflight` tells too. `command` completes the launch that is suggested."""
    found = setting_violations(settings, world_size, command)
    found += cast_violations(settings, roles(settings))
    found += [line for setting, path in data_sets(settings).items() for line in _missing(setting, path)]
    return list(dict.fromkeys(found))


def cast_violations(settings: AnyRun, cast: Mapping[str, Role]) -> list[str]:
    """What is wrong with the models of a run, or those of them that are wanted: folders, layouts, sizes, precision."""
    found: list[str] = []
    models = architectures({name: role for name, role in cast.items() if role.folder}, found)
    found += model_violations(settings, models)
    for name, architecture in models.items():
        found += te_violations(cast[name].linears, architecture, cast[name].layout, cast[name].setting)
        found += _expert_violations(settings, cast[name], architecture)
    if isinstance(settings, OnlineRun):
        found += [line for role in cast.values() for line in _scaling_violations(role)]
    return found


def _scaling_violations(role: Role) -> list[str]:
    if role.fp8.recipe != "delayed" or role.fp8.force_delayed:
        return []
    setting = "actor.generate_fp8" if role.name == "generator" else f"{role.name}.fp8"
    return [
        f"{setting}.recipe: delayed scaling takes its scales from earlier passes, which scoring and sampling disturb; "
        f"choose blockwise, or set {setting}.force_delayed to true"
    ]


def _expert_violations(settings: AnyRun, role: Role, architecture: Architecture) -> list[str]:
    section = vars(settings).get(role.name)
    if architecture.mixture or not isinstance(section, Trainee | Critic) or not section.balance_coef:
        return []
    return [f"{role.name}.balance_coef: {section.balance_coef}, but {role.folder} has no experts; set it to 0"]


def data_sets(settings: AnyRun) -> dict[str, str]:
    """The paths of what the run reads, by their settings."""
    if isinstance(settings, OnlineRun):
        found = {"data.prompts": settings.data.prompts}
    else:
        found = {"data.path": settings.data.path}
    if isinstance(settings, PPORun) and settings.pretraining.coef > 0:
        found["pretraining.path"] = settings.pretraining.path
    if isinstance(settings, RewardModelRun) and settings.statistics.max_examples > 0:
        found["statistics.path"] = settings.statistics.path
    return found


def _missing(setting: str, path: str) -> list[str]:
    if not path or path.startswith(HUB) or Path(path).exists():
        return []
    what = " of prompts" if setting == "data.prompts" else ""
    is_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and Path(path).suffix not in (".jsonl", ".json", ".parquet")
    hub = f", or {HUB}{path} for the hub's" if is_hub_name else ""
    return [
        f"{setting}: {Path(path).absolute()} is not there; give a JSONL or Parquet file{what}, or the folder of a data "
        f"set{hub}"
    ]
