"""From a run's settings to its tenants: where each waits, and which stages a step has. Pure; no torch.

The planner and the run read the same tables, so that what is predicted is what is done.
"""

from dataclasses import dataclass

from megarlhf.config.residency import CriticResidency, Residency, TrainedResidency
from megarlhf.config.runs import OnlineRun
from megarlhf.residency.stages import CACHE, GRADIENTS, OPTIMIZER, PACKED, WEIGHTS, Place, Stage, Tenant

REFERENCE = Tenant("reference", WEIGHTS)
GENERATOR_CACHE, GENERATOR_PACKED = Tenant("generator", CACHE), Tenant("generator", PACKED)


@dataclass(frozen=True)
class Sharing:
    """Which models live in the module of another."""

    reward_in_critic: bool = False
    """The reward model's weights are exchanged into the critic's module."""
    generator_in_actor: bool = False
    """The training weights are sampled from: there are no others."""


def homes(settings: OnlineRun) -> dict[Tenant, Place]:
    """Where each tenant of a run that samples waits. The generator's cache and repacked weights outlive no rollout.

    The reference has a place unless nothing is made of it, it is asked over HTTP, or it is the actor without its
    adapters; the reward model and the critic where the run has one. A second set of weights that is exchanged into a
    module (the reference's, or those of a reward model that lives in the critic's) stays where it waits: it holds the
    module's own meanwhile.
    """
    residency = settings.residency
    found = _trained("actor", residency.actor, residency.idle)
    if isinstance(residency, CriticResidency):
        found |= _trained("critic", residency.critic, residency.idle)
    if settings.algorithm.needs_reference and not settings.reference.url and not settings.actor.lora.rank:
        found[REFERENCE] = reference_home(residency)
    if settings.reward.model:
        found[Tenant("reward", WEIGHTS)] = residency.reward or residency.idle
    generator = residency.generator or ("device" if residency.idle == "device" else "freed")
    if generator != "view":
        found[Tenant("generator", WEIGHTS)] = "gone" if generator == "freed" else "device"
    return found | {GENERATOR_CACHE: "gone", GENERATOR_PACKED: "gone"}


def reference_home(residency: Residency) -> Place:
    """Where the reference's weights wait; never on the device unless that is asked for."""
    return residency.reference or ("host" if residency.idle == "device" else residency.idle)


def _trained(model: str, section: TrainedResidency, idle: Place) -> dict[Tenant, Place]:
    gradients = section.gradients or ("device" if idle == "device" else "freed")
    return {
        Tenant(model, WEIGHTS): section.weights or idle,
        Tenant(model, GRADIENTS): "device" if gradients == "device" else "gone",
        Tenant(model, OPTIMIZER): section.optimizer or idle,
    }


def all_of(model: str) -> tuple[Tenant, ...]:
    """What an update of a model works with."""
    return Tenant(model, WEIGHTS), Tenant(model, GRADIENTS), Tenant(model, OPTIMIZER)


def stages(found: dict[Tenant, Place], sharing: Sharing, *, scores_start: bool = True) -> tuple[Stage, ...]:
    """The stages of a step in order, of a run with the tenants of `homes`.

    `scores_start`: the log-probs before the update take a pass of their own (`config.runs.update_says_start`).

    Before sampling: optimizer and gradients out, new weights into the generation layout bucket by bucket, the training
    weights out, then the cache.
    """
    actor, critic, reward = (Tenant(model, WEIGHTS) for model in ("actor", "critic", "reward"))
    generator = Tenant("generator", WEIGHTS)
    sampled = actor if sharing.generator_in_actor else generator
    steps = [] if sharing.generator_in_actor else [Stage("reshard", (actor, generator))]
    steps += [Stage("generate", (sampled, GENERATOR_PACKED, GENERATOR_CACHE))]
    steps += [Stage("logp", (actor,))] if scores_start else []
    steps += [Stage("reference", (actor,))] if REFERENCE in found else []
    steps += [Stage("reward", (critic if sharing.reward_in_critic else reward,))] if reward in found else []
    if critic in found:
        steps += [Stage("value", (critic,)), Stage("learn_critic", all_of("critic"))]
    return (*steps, Stage("learn_actor", all_of("actor")))
