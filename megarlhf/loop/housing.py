"""Which parts of a run's models its residency moves, and how a reward model comes to live in the critic's module."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megarlhf.config.runs import AnyRun, OnlineRun
from megarlhf.engines.learner import Learner
from megarlhf.loop.roles import Role
from megarlhf.models.architecture import Architecture
from megarlhf.models.build import Model
from megarlhf.residency.residency import Residency
from megarlhf.residency.schedule import GENERATOR_CACHE, GENERATOR_PACKED, all_of, homes
from megarlhf.residency.stages import GRADIENTS, OPTIMIZER, WEIGHTS, Place, Tenant


def residency_of(settings: AnyRun) -> Residency:
    """Moves this rank's tenants as the settings say; a run over a data set keeps its model on the device."""
    folder = Path(settings.run.dir) / "residency" / f"rank{dist.get_rank()}"
    if not isinstance(settings, OnlineRun):
        return Residency({}, folder)
    section = settings.residency
    residency = Residency(
        homes(settings),
        Path(section.folder) / f"rank{dist.get_rank()}" if section.folder else folder,
        budget_bytes=int(section.device_gib * 2**30),
        is_checked=section.check_transfers,
    )
    residency.add_passing(GENERATOR_CACHE, GENERATOR_PACKED)
    return residency


def house_learner(residency: Residency, name: str, learner: Learner) -> None:
    """A trained model's parts; those with a home elsewhere go there."""
    residency.add(Tenant(name, GRADIENTS), learner.gradient_buffers)
    residency.add(Tenant(name, OPTIMIZER), learner.optimizer_state)
    learner.require_resident = partial(residency.require, *all_of(name))
    house_weights(residency, name, learner.model)


def house_weights(residency: Residency, name: str, model: Model) -> None:
    """A model's weights; they go home."""
    residency.add(Tenant(name, WEIGHTS), lambda: model.named_parameters().values(), model.weights_changed)
    residency.guard(name, model.chunks)
    residency.rest()


def reward_lives_in_critic(reward_home: Place, cast: dict[str, Role]) -> bool:
    """Whether the reward model's weights can be exchanged into the critic's module, as the reference's into the
    actor's: they wait elsewhere, and architecture, layout and precision are the same.

    A critic with adapters has another module, and one that starts from a language model has another architecture.
    """
    if "critic" not in cast or reward_home == "device" or cast["critic"].lora.rank:
        return False
    critic, reward = cast["critic"], cast["reward"]
    as_reward = replace(critic, name="reward", folder=reward.folder, setting=reward.setting, is_trained=False)
    as_reward = replace(as_reward, recompute=reward.recompute)  # matters while training only
    if critic.new_head == "always" or replace(as_reward, new_head=reward.new_head) != reward:
        return False
    return Architecture.from_folder(critic.folder) == Architecture.from_folder(reward.folder)
