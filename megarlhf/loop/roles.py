"""Which model folder, layout and precision each role ends up with, once the settings' empty fields are filled in."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from megarlhf.config.layout import Layout
from megarlhf.config.settings import PPORun, Precision
from megarlhf.errors import MegarlhfError
from megarlhf.models.architecture import Architecture
from megarlhf.models.names import Head

Value = TypeVar("Value")


@dataclass(frozen=True)
class Role:
    """One model of the run, as it will be built."""

    name: str
    folder: str
    layout: Layout
    head: Head
    dtype: Precision
    setting: str
    """The layout's setting as the user types it."""


def roles(settings: PPORun) -> dict[str, Role]:
    """Actor, generator, critic, and the reward model when there is one; the reference shares the actor's module.

    The critic starts from the reward model's weights unless it has a folder of its own; without a reward model it
    starts from the actor's, with a new value head.
    """
    actor, critic, reward = settings.actor, settings.critic, settings.reward
    critic_layout = critic.train or actor.train
    found = [
        Role("actor", actor.model, actor.train, "vocabulary", actor.dtype, "actor.train"),
        Role("generator", actor.model, actor.generate, "vocabulary", actor.dtype, "actor.generate"),
        Role(
            "critic", critic.model or reward.model or actor.model, critic_layout, "value", critic.dtype, "critic.train"
        ),
    ]
    if reward.model:
        found.append(Role("reward", reward.model, reward.train or critic_layout, "value", reward.dtype, "reward.train"))
    return {role.name: role for role in found}


def attempt(call: Callable[[], Value], violations: list[str], setting: str) -> Value | None:
    """The call's value; or None with our error's sentences in `violations`, each opening with the setting."""
    try:
        return call()
    except MegarlhfError as problem:
        violations += [f"{setting}: {line}" for line in str(problem).splitlines()]
        return None


def architectures(found: dict[str, Role], violations: list[str]) -> dict[str, Architecture]:
    """The architecture of each role's folder; what cannot be read or built goes to `violations`, once per folder."""
    result: dict[str, Architecture] = {}
    by_folder: dict[str, Architecture | None] = {}
    for name, role in found.items():
        if role.folder not in by_folder:
            setting = f"{'actor' if name == 'generator' else name}.model"
            by_folder[role.folder] = attempt(partial(Architecture.from_folder, role.folder), violations, setting)
        architecture = by_folder[role.folder]
        if architecture is not None:
            result[name] = architecture
    return result
