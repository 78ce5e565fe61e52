"""Which model folder, layout and precision each role ends up with, once the settings' empty fields are filled in."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from megarlhf.config.layout import Layout
from megarlhf.config.lora import LoRA
from megarlhf.config.precision import FP8, Layers
from megarlhf.config.runs import AnyRun, OnlineRun, PPORun, RewardModelRun
from megarlhf.config.settings import Critic, NewHead, Precision, Recompute, Trainee
from megarlhf.errors import MegarlhfError
from megarlhf.models.architecture import Architecture
from megarlhf.models.names import Head
from megarlhf.models.precision.linears import Linears

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
    lora: LoRA = LoRA()
    """Adapters to train in place of the model."""
    dropout: float = 0.0
    """While training."""
    recompute: Recompute = "none"
    """While training."""
    new_head: NewHead = "never"
    """When a value head starts anew."""
    labels: tuple[str, ...] = ()
    """Names of a new head's rows; none: one row."""
    is_trained: bool = False
    layers: Layers = "local"
    """What its linears are."""
    fp8: FP8 = FP8()
    """What they compute in."""

    def has_new_head(self, architecture: Architecture) -> bool:
        """Whether the model starts with a head of its own rather than the one of its folder (`architecture`)."""
        if self.head != "value" or self.new_head == "never":
            return False
        return self.new_head == "always" or not architecture.num_labels

    @property
    def linears(self) -> Linears:
        """The choice of linears as a model is built with it. Rollouts change the generator's weights at every step, so
        that it keeps what it quantised for the many passes in between."""
        is_frozen = not self.is_trained and self.name != "generator"
        return Linears(self.layers, self.fp8, is_frozen=is_frozen, takes_adapters=self.lora.rank > 0)

    def built(self, architecture: Architecture) -> Architecture:
        """The architecture as it is built, with the labels of a new head."""
        if not self.has_new_head(architecture):
            return architecture
        return replace(architecture, num_labels=max(1, len(self.labels)), labels=self.labels, head_bias=False)


def roles(settings: AnyRun) -> dict[str, Role]:
    """The models of a run by name. The reference has none of its own: it shares the actor's module.

    Online: actor, generator, PPO's critic, and the reward model when there is one. The critic starts from the reward
    model's weights, head included, unless it has a folder of its own; without a reward model it starts from the
    actor's, with a new value head unless critic.new_head forbids it. Offline: the one model that is trained.
    """
    if isinstance(settings, RewardModelRun):
        reward = _trained("reward", settings.reward.model, settings.reward.train, "value", settings.reward)
        found = [replace(reward, new_head=settings.reward.new_head, labels=settings.algorithm.attributes)]
    else:
        found = [_trained("actor", settings.actor.model, settings.actor.train, "vocabulary", settings.actor)]
    if isinstance(settings, OnlineRun):
        found += _online(settings)
    return {role.name: role for role in found}


def loading(found: Iterable[Role]) -> str:
    """What is read before the first step, for the person who waits."""
    return "loading " + ", ".join(f"{role.name} {role.folder}" for role in found if role.name != "generator")


def _online(settings: OnlineRun) -> list[Role]:
    actor, reward = settings.actor, settings.reward
    judge = actor.train
    sampled_in = actor.fp8 if actor.generate_fp8 is None else actor.generate_fp8
    found = [
        Role(
            "generator",
            actor.model,
            actor.generate,
            "vocabulary",
            actor.dtype,
            "actor.generate",
            layers=actor.layers,
            fp8=sampled_in,
        )
    ]
    if isinstance(settings, PPORun):
        critic = settings.critic
        judge = critic.train or actor.train
        trained = _trained("critic", critic.model or reward.model or actor.model, judge, "value", critic)
        found.append(replace(trained, new_head=critic.new_head))
    if reward.model:
        layout = reward.train or judge
        role = Role("reward", reward.model, layout, "value", reward.dtype, "reward.train")
        found.append(replace(role, layers=reward.layers, fp8=reward.fp8))
    return found


def _trained(name: str, folder: str, layout: Layout, head: Head, section: Trainee | Critic) -> Role:
    dropout = section.dropout if isinstance(section, Trainee) else 0.0
    return Role(
        name,
        folder,
        layout,
        head,
        section.dtype,
        f"{name}.train",
        section.lora,
        dropout,
        section.recompute,
        is_trained=True,
        layers=section.layers,
        fp8=section.fp8,
    )


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
