"""Building the models and engines of a run, in an order that every rank follows alike."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from megarlhf.config.layout import Layout
from megarlhf.config.settings import Critic, Reference, Trainee
from megarlhf.engines.learner import Learner
from megarlhf.engines.scorer import AdapterFreeScorer, LogprobScorer, ReferenceScorer
from megarlhf.loop.roles import Role
from megarlhf.loop.run import Follower
from megarlhf.models.architecture import Architecture
from megarlhf.models.build import Model, build_model
from megarlhf.models.lora import add_lora
from megarlhf.models.precision.linears import unaligned
from megarlhf.parallel.groups import Groups, build_groups
from megarlhf.records.seeds import derive_seed
from megarlhf.residency.average import Average
from megarlhf.residency.residency import Residency
from megarlhf.residency.schedule import REFERENCE
from megarlhf.weights.exchange import DTYPES
from megarlhf.weights.load import LoadReport, load_weights

_log = logging.getLogger(__name__)


@dataclass
class Workshop:
    """Builds models for one world; layouts that are equal share their process groups."""

    world_size: int
    seed: int
    shards: Sequence[Sequence[int]] = ()
    """Ranks by shard of a step's batch; none: all hold all of it."""
    groups: dict[Layout, Groups] = field(default_factory=dict)

    def model(self, role: Role, *, load: bool = True) -> Model:
        """A model of `role`, with its folder's weights unless `load` is false. Collective over the world.

        A trained value model may start with a new head of zeros (`Role.new_head`). Adapters come with their own seed.
        """
        if role.layout not in self.groups:
            self.groups[role.layout] = build_groups(role.layout, self.world_size, self.shards)
        in_folder = Architecture.from_folder(role.folder)
        architecture = role.built(in_folder)
        dtype = DTYPES[role.dtype]
        groups = self.groups[role.layout]
        model = build_model(
            architecture,
            groups,
            head=role.head,
            dtype=dtype,
            seed=None,
            dropout=role.dropout,
            recompute=role.recompute,
            linears=role.linears,
        )
        ragged = unaligned(role.linears, architecture, role.layout)
        if ragged and groups.rank == 0:
            _log.warning(
                "%s: blockwise scales cover 128 columns, and a rank has %s: what they are depends on tp (%s)",
                role.name,
                ", ".join(ragged),
                role.setting,
            )
        if load:
            report = load_weights(model, role.folder, new_value_head=role.has_new_head(in_folder))
            if groups.rank == 0:
                _tell_head(role, in_folder, report)
        if role.lora.rank:
            add_lora(model, role.lora, derive_seed(self.seed, "lora", role.name))
        return model


def _tell_head(role: Role, in_folder: Architecture, report: LoadReport) -> None:
    """Which head a value model has, where it is not simply the folder's `score`."""
    if report.is_value_head_new:
        lacks = f"{role.folder} has no {'score' if role.name == 'reward' else 'value'} head"
        why = f"the head of {role.folder} is not used" if in_folder.num_labels else lacks
        _log.warning("%s: %s; it starts with a new one, which is zero (new_head %s)", role.name, why, role.new_head)
    elif report.head not in ("", "score"):
        left = f"; left behind: {', '.join(report.ignored)}" if report.ignored else ""
        _log.warning("%s: the head of %s is its %s%s", role.name, role.folder, report.head, left)


@dataclass(frozen=True)
class LocalReference:
    """The reference kept in the actor's module, and the average that moves when it follows the actor."""

    scorer: ReferenceScorer | AdapterFreeScorer
    followers: tuple[Follower, ...] = ()


def local_reference(
    settings: Reference, actor: Trainee, model: Model, temperature: float, residency: Residency
) -> LocalReference:
    """The reference of the actor's `model`, whose weights are still those of its folder. Collective over the world.

    With adapters it is the model without them; otherwise a second set of weights where `residency` says, read into the
    module where they come from a folder of their own.
    """
    scorer = LogprobScorer(model, "logp_reference", temperature, actor.micro_batch_tokens)
    if actor.lora.rank:
        return LocalReference(AdapterFreeScorer(scorer))
    parameters = model.named_parameters()
    if settings.model:
        load_weights(model, settings.model)
    average = Average(parameters, 1 - settings.follow_rate) if settings.follow_rate else None
    weights = average or residency.snapshot(REFERENCE, parameters)
    residency.add_exchanged(REFERENCE, weights)
    if settings.model:
        load_weights(model, actor.model)
    followers = (Follower(average, "actor"),) if average else ()
    return LocalReference(ReferenceScorer(weights, scorer), followers)


def learner(model: Model, settings: Trainee | Critic, total_updates: int, seed: int) -> Learner:
    """The learner of a role's section; `seed` is the run's. Collective over the world."""
    has_dropout = isinstance(settings, Trainee) and settings.dropout > 0
    return Learner(
        model,
        settings.optimizer,
        total_updates=total_updates,
        max_tokens=settings.micro_batch_tokens,
        dropout_seed=seed if has_dropout else None,
        balance_coef=settings.balance_coef,
    )
