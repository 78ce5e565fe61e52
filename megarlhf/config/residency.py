"""Where models wait while a stage does not work with them: one choice for all, and exceptions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megarlhf.config.layout import Layout

Place = Literal["device", "host", "disk"]
Freed = Literal["device", "freed"]


@dataclass(frozen=True)
class TrainedResidency:
    """The parts of a trained model. What is not given is as `residency.idle` says."""

    weights: Place | None = None
    """Its weights."""
    gradients: Freed | None = None
    """Its gradient buffers; nothing in them outlives an update, so they are freed rather than moved."""
    optimizer: Place | None = None
    """Its optimizer state: moments, and float32 master weights under bfloat16."""


@dataclass(frozen=True)
class Residency:
    """What waits where while a stage works with something else. Results do not depend on it, to the bit."""

    idle: Place = "device"
    """Where everything waits that has no place of its own below. device: all models stay in device memory; host: in
    pinned host memory (on a CPU a copy in the same memory: nothing is saved); disk: in files, and memory is freed."""
    actor: TrainedResidency = TrainedResidency()
    """The actor's parts."""
    reference: Place | None = None
    """The reference's weights, which are exchanged into the actor's module; host when residency.idle is device."""
    reward: Place | None = None
    """The reward model's weights. On host or disk they share the critic's module where architecture, layout and
    precision are the same."""
    generator: Literal["device", "freed", "view"] | None = None
    """The weights in the generation layout between two rollouts. freed: their memory is given back, the next reshard
    fills it again; view: none are kept, the training weights are sampled from (actor.generate must be actor.train)."""
    folder: str = ""
    """Folder for what waits on disk, about as large as the models with their optimizers; empty: RUN_DIR/residency."""
    device_gib: float = 0.0
    """Most GiB that tenants may take on a rank's device together; more is an error that names who is in the way. 0: no
    limit."""
    check_transfers: bool = False
    """Compare checksums after every transfer: weights between layouts, and whatever comes back from host or disk."""


@dataclass(frozen=True)
class CriticResidency(Residency):
    """With the places of PPO's critic."""

    critic: TrainedResidency = TrainedResidency()
    """The critic's parts."""


def view_violations(train: Layout, generate: Layout, lora_rank: int, *, is_one_precision: bool) -> Iterator[str]:
    """Why the training weights cannot be sampled from as they are. `is_one_precision`: both compute alike."""
    if train != generate:
        yield (
            f"residency.generator: view samples from the training weights, and actor.generate {generate} is another "
            f"layout than actor.train {train}; make them the same, or choose freed"
        )
    if not is_one_precision:
        yield (
            "residency.generator: view samples with the training model, and actor.generate_fp8 is not actor.fp8; leave "
            "actor.generate_fp8 out, or choose freed"
        )
    if lora_rank:
        yield (
            f"residency.generator: view and actor.lora.rank {lora_rank}: adapters are merged into the weights that are "
            "sampled from, which needs a copy; choose freed"
        )


def residency_violations(settings: Residency, *, follows: bool) -> Iterator[str]:
    """What cannot be as set. `follows`: the reference moves with the actor."""
    if follows and settings.reference not in (None, "host"):
        yield (
            f"residency.reference: {settings.reference} and reference.follow_rate: a reference that follows the actor "
            "is a float32 average on the host; leave residency.reference out, or set reference.follow_rate to 0"
        )
