"""Runs over a data set: supervised fine-tuning, reward models, and preferences without sampling."""

from megarlhf import device
from megarlhf.algorithms.catalogue import Algorithm
from megarlhf.config.runs import DPORun, KTORun, OfflineRun, RewardModelRun
from megarlhf.data.batches import CorpusBatches, MaskRule
from megarlhf.data.examples import Example
from megarlhf.data.order import PromptOrder
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.engines.scorer import LogprobScorer
from megarlhf.errors import ConfigError
from megarlhf.loop.housing import house_learner, residency_of
from megarlhf.loop.profiling import stage_label
from megarlhf.loop.reading import read_measured, reading, tell_repeats
from megarlhf.loop.remote import remote_reference
from megarlhf.loop.roles import loading, roles
from megarlhf.loop.run import Follower, Passes, Run, Scorer
from megarlhf.loop.statistics import ScoreMeasure
from megarlhf.loop.workshop import Workshop, learner, local_reference
from megarlhf.models.build import Model
from megarlhf.residency.residency import Residency
from megarlhf.telemetry.report import Reporter
from megarlhf.telemetry.spans import Spans


def build_offline(settings: OfflineRun, algorithm: Algorithm, world_size: int, reporter: Reporter) -> Run:
    """Everything a run needs, with weights loaded. Collective over the world; `settings` passed `preflight`."""
    role = next(iter(roles(settings).values()))
    reporter.say(loading([role]))
    tokenizer, how = Tokenizer(role.folder), reading(settings)
    examples = how.read(settings.data, tokenizer, "data")
    order = PromptOrder(len(examples), settings.data.batch_size, settings.run.seed, settings.data.shuffle)
    whole = order.steps_of(settings.data.epochs)
    num_steps = min(settings.run.steps or whole, whole)
    _check_profiled(settings, num_steps)
    residency = residency_of(settings)  # before there is a model: what is allocated now is not the run's
    model = Workshop(world_size, settings.run.seed).model(role)
    if model.groups.rank == 0:
        tell_repeats("data.path", settings, len(examples))
    section = settings.reward if isinstance(settings, RewardModelRun) else settings.actor
    scorers: dict[str, Scorer] = {}
    followers: tuple[Follower, ...] = ()
    if isinstance(settings, DPORun | KTORun):
        scorers, followers = _scorers(settings, algorithm, model, tokenizer.fingerprint, residency)
    trained = learner(model, section, num_steps, settings.run.seed)
    house_learner(residency, role.name, trained)
    return Run(
        settings=settings,
        algorithm=algorithm,
        source=_batches(settings, examples, order, how.mask),
        scorers=scorers,
        learners={role.name: trained},
        num_steps=num_steps,
        passes=Passes(),
        temperature=1.0,
        reporter=reporter,
        spans=Spans(device.synchronize, stage_label),
        state=algorithm.initial_state(settings.algorithm),
        roles={role.name: role},
        residency=residency,
        modules=dict.fromkeys([*scorers, f"learn_{role.name}"], (role.name,)),
        followers=followers,
        measure=_measure(settings, examples, tokenizer, model) if isinstance(settings, RewardModelRun) else None,
    )


def _check_profiled(settings: OfflineRun, num_steps: int) -> None:
    """Raises ConfigError where a step is to be profiled that a run over these rows never does."""
    if too_late := [step for step in settings.run.profile if step > num_steps]:
        raise ConfigError(
            f"run.profile: step {too_late[0]} is beyond the {num_steps} that data.epochs {settings.data.epochs} and "
            f"data.batch_size {settings.data.batch_size} make of the rows; choose steps from 1 to {num_steps}"
        )


def _measure(
    settings: RewardModelRun, examples: list[Example], tokenizer: Tokenizer, model: Model
) -> ScoreMeasure | None:
    """What measures the scores of the exported model, on a data set that is read before anything is trained."""
    where, limit = settings.statistics, settings.statistics.max_examples
    if not limit:
        return None
    if where.path:
        examples = read_measured(settings, tokenizer)
    return ScoreMeasure(model, examples[:limit], settings.reward.micro_batch_tokens)


def _batches(settings: OfflineRun, examples: list[Example], order: PromptOrder, mask: MaskRule) -> CorpusBatches:
    if isinstance(settings, RewardModelRun):
        return CorpusBatches(examples, order, mask, settings.negatives)
    return CorpusBatches(examples, order, mask)


def _scorers(
    settings: DPORun | KTORun, algorithm: Algorithm, model: Model, tokenizer: str, residency: Residency
) -> tuple[dict[str, Scorer], tuple[Follower, ...]]:
    """The reference, kept here or asked, and the model itself where the algorithm reads what it says before the update.

    `tokenizer` is the fingerprint of the actor's.
    """
    found: dict[str, Scorer] = {}
    max_tokens = settings.actor.micro_batch_tokens
    if "logp_start" in algorithm.reads(settings.algorithm):
        found["logp"] = LogprobScorer(model, "logp_start", 1.0, max_tokens)
    if settings.reference.url:
        return found | {"reference": remote_reference(settings.reference, tokenizer, 1.0)}, ()
    reference = local_reference(settings.reference, settings.actor, model, 1.0, residency)
    return found | {"reference": reference.scorer}, reference.followers
