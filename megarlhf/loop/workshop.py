"""Building the models and engines of a run, in an order that every rank follows alike."""

from dataclasses import dataclass, field

import torch

from megarlhf.config.layout import Layout
from megarlhf.config.settings import Critic, Trainee
from megarlhf.engines.learner import Learner
from megarlhf.loop.roles import Role
from megarlhf.models.architecture import Architecture
from megarlhf.models.build import Model, build_model
from megarlhf.parallel.groups import Groups, build_groups
from megarlhf.residency.snapshot import Snapshot
from megarlhf.weights.load import load_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Workshop:
    """Builds models for one world; layouts that are equal share their process groups."""

    world_size: int
    groups: dict[Layout, Groups] = field(default_factory=dict)

    def model(self, role: Role, *, load: bool = True, new_value_head: bool = False) -> Model:
        """A model of `role`, with its folder's weights unless `load` is false. Collective over the world.

        `new_value_head` lets a value model start from a language model, with a head of zeros.
        """
        if role.layout not in self.groups:
            self.groups[role.layout] = build_groups(role.layout, self.world_size)
        architecture = Architecture.from_folder(role.folder)
        dtype = DTYPES[role.dtype]
        model = build_model(architecture, self.groups[role.layout], head=role.head, dtype=dtype, seed=None)
        if load:
            load_weights(model, role.folder, new_value_head=new_value_head)
        return model


def reference_snapshot(actor: Model, actor_folder: str, reference_folder: str) -> Snapshot:
    """The reference's weights, read into the actor's module where they come from a folder of their own.

    Collective over the world. An empty `reference_folder` means the actor's weights as they are now.
    """
    if not reference_folder:
        return Snapshot(actor.named_parameters())
    load_weights(actor, reference_folder)
    snapshot = Snapshot(actor.named_parameters())
    load_weights(actor, actor_folder)
    return snapshot


def learner(model: Model, settings: Trainee | Critic, total_updates: int) -> Learner:
    """The learner of a role's section. Collective over the world."""
    return Learner(model, settings.optimizer, total_updates=total_updates, max_tokens=settings.micro_batch_tokens)
