"""Runs that sample from the policy they train: PPO and the algorithms without a critic."""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megarlhf import device
from megarlhf.algorithms.catalogue import Algorithm
from megarlhf.algorithms.schedule import updates_per_step
from megarlhf.config.runs import OnlineRun, PPORun, update_says_start
from megarlhf.config.settings import Reward
from megarlhf.data.order import PromptOrder
from megarlhf.data.prompts import read_prompts
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.engines.generator import Generator, Sampling
from megarlhf.engines.learner import Learner
from megarlhf.engines.scorer import ExchangedRewardModelScorer, LogprobScorer, RewardModelScorer, ValueScorer
from megarlhf.loop.dynamic import DynamicRollouts
from megarlhf.loop.housing import house_learner, house_weights, residency_of, reward_lives_in_critic
from megarlhf.loop.mixture import pretraining_mix
from megarlhf.loop.profiling import stage_label
from megarlhf.loop.reading import tell_repeats
from megarlhf.loop.remote import remote_reference
from megarlhf.loop.roles import Role, loading, roles
from megarlhf.loop.rollouts import Rollouts
from megarlhf.loop.run import Follower, Mixture, Passes, Run, Scorer, Source
from megarlhf.loop.scoring import Report, reward_scores
from megarlhf.loop.workshop import Workshop, learner, local_reference
from megarlhf.models.build import Model
from megarlhf.models.score_config import score_rule
from megarlhf.parallel.grid import shards
from megarlhf.records.metrics import Metric
from megarlhf.records.shards import Shard
from megarlhf.residency.average import Average
from megarlhf.residency.residency import Residency
from megarlhf.residency.schedule import homes
from megarlhf.residency.stages import WEIGHTS, Tenant
from megarlhf.telemetry.report import Reporter
from megarlhf.telemetry.spans import Spans
from megarlhf.weights.adapters import trained_parameters
from megarlhf.weights.exchange import Resharder
from megarlhf.weights.load import load_weights

_log = logging.getLogger(__name__)

MODULES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("logp", "reference", "learn_actor"), ("actor",)),
    **dict.fromkeys(("value", "learn_critic"), ("critic",)),
}
"""Models that each stage works with, by its name; the reward model's place is decided by `_judge_and_critic`."""


def build_online(
    settings: OnlineRun, algorithm: Algorithm, world_size: int, reporter: Reporter, source: Source | None = None
) -> Run:
    """Everything a run needs, with weights loaded. Collective over the world; `settings` passed `preflight`.

    Given a `source` of batches, nothing is sampled: there is no generator, and prompts are not read.
    """
    tokenizer = Tokenizer(settings.actor.model, stop_tokens=settings.rollout.stop_tokens)
    prompts = None if source else read_prompts(Path(settings.data.prompts), tokenizer, settings.data)
    cast = roles(settings)
    reporter.say(loading(cast.values()))
    layouts = [role.layout for role in cast.values()]
    # a batch that is given is given whole
    held = [] if source else shards(layouts, world_size, settings.rollout.shards)
    workshop = Workshop(world_size, settings.run.seed, held)
    reported: list[dict[str, Metric]] = []
    spans = Spans(device.synchronize, stage_label)
    residency = residency_of(settings)
    actor_model = workshop.model(cast["actor"])
    shard = actor_model.groups.shard
    if prompts is not None and actor_model.groups.rank == 0:
        tell_repeats("data.prompts", settings, len(prompts))
    scorers, followers = _actor_scorers(settings, algorithm, actor_model, tokenizer.fingerprint, residency)
    updates = settings.run.steps * updates_per_step(settings.algorithm)
    first_step = settings.algorithm.critic_warmup_steps if isinstance(settings, PPORun) else 0
    actor_updates = (settings.run.steps - first_step) * updates_per_step(settings.algorithm)
    actor = learner(actor_model, settings.actor, actor_updates, settings.run.seed)
    house_learner(residency, "actor", actor)
    judge, learners = _judge_and_critic(settings, workshop, cast, updates, residency)
    modules = MODULES | {"reward": judge.modules}
    scores = reward_scores(settings.reward, judge.scorer, tokenizer.fingerprint, reported.append, shard)
    if prompts is not None:
        rollouts = _rollouts(settings, tokenizer, prompts, workshop, cast, actor, spans, reported.append, residency)
        source = rollouts
    if settings.rollout.extra_rounds and prompts is not None:
        scoring = partial(residency.stage, "reward", [Tenant(model, WEIGHTS) for model in judge.modules])
        source = DynamicRollouts(rollouts, scores, scoring, settings.rollout.extra_rounds, reported.append)
    else:
        scorers["reward"] = scores
    if isinstance(settings, PPORun) and "critic" in learners:
        scorers["value"] = ValueScorer(learners["critic"].model, settings.critic.micro_batch_tokens)
    return Run(
        settings=settings,
        algorithm=algorithm,
        source=source,
        scorers=scorers,
        learners=learners | {"actor": actor},
        first_steps={"actor": first_step},
        num_steps=settings.run.steps,
        passes=Passes(settings.algorithm.num_epochs, settings.algorithm.num_minibatches, settings.algorithm.target_kl),
        temperature=settings.rollout.temperature,
        reporter=reporter,
        spans=spans,
        state=algorithm.initial_state(settings.algorithm),
        roles={name: cast[name] for name in (*learners, "actor")},
        residency=residency,
        modules=modules,
        mixtures=_mixtures(settings, tokenizer, shard),
        followers=followers,
        judge=scores,
        shard=shard,
        reported=reported,
    )


def _mixtures(settings: OnlineRun, tokenizer: Tokenizer, shard: Shard) -> dict[str, Mixture]:
    if not isinstance(settings, PPORun) or not settings.pretraining.coef:
        return {}
    return {"actor": pretraining_mix(settings.pretraining, tokenizer, settings.run.seed, shard)}


def _actor_scorers(
    settings: OnlineRun, algorithm: Algorithm, actor: Model, tokenizer: str, residency: Residency
) -> tuple[dict[str, Scorer], tuple[Follower, ...]]:
    """Log-probs in the training layout unless the update says them, and the reference's (kept here or asked) where the
    algorithm reads them; and the averages that move with the actor. `tokenizer` is the fingerprint of the actor's.
    """
    temperature, max_tokens = settings.rollout.temperature, settings.actor.micro_batch_tokens
    scorers: dict[str, Scorer] = {}
    if not update_says_start(settings):
        scorers["logp"] = LogprobScorer(actor, "logp_start", temperature, max_tokens)
    followers: tuple[Follower, ...] = ()
    if settings.actor.average_decay:
        average = Average(trained_parameters(actor), settings.actor.average_decay)  # adapters only, with LoRA
        followers = (Follower(average, "actor", "hf_average"),)
    if "logp_reference" not in algorithm.reads(settings.algorithm):
        return scorers, followers
    if settings.reference.url:
        scorers["reference"] = remote_reference(settings.reference, tokenizer, temperature, actor.groups.shard)
        return scorers, followers
    reference = local_reference(settings.reference, settings.actor, actor, temperature, residency)
    scorers["reference"] = reference.scorer
    return scorers, (*followers, *reference.followers)


@dataclass(frozen=True)
class Judge:
    """The reward model as a scorer (None: there is none), and the models whose modules it works in."""

    scorer: RewardModelScorer | ExchangedRewardModelScorer | None
    modules: tuple[str, ...]


def _judge_and_critic(
    settings: OnlineRun, workshop: Workshop, cast: dict[str, Role], updates: int, residency: Residency
) -> tuple[Judge, dict[str, Learner]]:
    """The reward model, in a module of its own or in the critic's, and PPO's critic. Collective over the world."""
    judge, learners, reward = Judge(None, ()), {}, Tenant("reward", WEIGHTS)
    is_shared = "reward" in cast and reward_lives_in_critic(homes(settings)[reward], cast)
    if isinstance(settings, PPORun):
        model = workshop.model(cast["critic"])
        if is_shared:
            judge = Judge(_exchanged(settings, cast, model, residency), ("critic",))
        if model.groups.rank == 0:
            _tell_scale(settings, cast)
        learners["critic"] = learner(model, settings.critic, updates, settings.run.seed)
        house_learner(residency, "critic", learners["critic"])
    if "reward" in cast and not is_shared:
        model = workshop.model(cast["reward"])
        house_weights(residency, "reward", model)
        judge = Judge(_reward_scorer(settings.reward, model), ("reward",))
    return judge, learners


def _tell_scale(settings: PPORun, cast: dict[str, Role]) -> None:
    """Warns of a critic that starts from the reward model's head: it says scores as they are before normalisation."""
    critic, has_time = cast["critic"], settings.algorithm.critic_warmup_steps > 0
    if has_time or critic.folder != settings.reward.model or critic.new_head == "always":
        return
    statistics = score_rule(settings.reward.model, settings.reward.attribute_weights, normalise=True).statistics
    if statistics is not None and settings.reward.normalise:
        _log.warning(
            "critic: it starts with the reward model's head, whose scores have mean %.3g and deviation %.3g, while "
            "rewards are normalised to 0 and 1: let it learn alone at first (algorithm.critic_warmup_steps), or set "
            "reward.normalise to false",
            *(statistics.mean[0], statistics.std[0]),
        )


def _exchanged(
    settings: OnlineRun, cast: dict[str, Role], critic: Model, residency: Residency
) -> ExchangedRewardModelScorer:
    """The reward model's weights, to be exchanged into the critic's module; the critic's are in it afterwards."""
    reward = Tenant("reward", WEIGHTS)
    is_other = cast["reward"].folder != cast["critic"].folder
    if is_other:
        load_weights(critic, cast["reward"].folder)
    weights = residency.snapshot(reward, critic.named_parameters())
    residency.add_exchanged(reward, weights)
    if is_other:
        load_weights(critic, cast["critic"].folder)
    return ExchangedRewardModelScorer(weights, _reward_scorer(settings.reward, critic))


def _reward_scorer(settings: Reward, model: Model) -> RewardModelScorer:
    rule = score_rule(settings.model, settings.attribute_weights, normalise=settings.normalise)
    return RewardModelScorer(model, settings.micro_batch_tokens, rule)


def _rollouts(
    settings: OnlineRun,
    tokenizer: Tokenizer,
    prompts: list,
    workshop: Workshop,
    cast: dict[str, Role],
    actor: Learner,
    spans: Spans,
    report: Report,
    residency: Residency,
) -> Rollouts:
    rollout, is_view = settings.rollout, settings.residency.generator == "view"
    generator = actor.model if is_view else workshop.model(cast["generator"], load=False)
    if not is_view:
        house_weights(residency, "generator", generator)
    return Rollouts(
        prompts=prompts,
        order=PromptOrder(len(prompts), rollout.batch_size, settings.run.seed, settings.data.shuffle),
        samples_per_prompt=rollout.samples_per_prompt,
        sampling=Sampling(
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            max_new_tokens=rollout.max_new_tokens,
            min_new_tokens=rollout.min_new_tokens,
            stop_ids=tokenizer.stop_ids,
            seed=settings.run.seed,
            step=0,
        ),
        tokenizer=tokenizer,
        generator=Generator(generator, max_slots=rollout.max_slots),
        actor=actor,
        resharder=None if is_view else Resharder(actor.model, generator),
        residency=residency,
        spans=spans,
        report=report,
        is_checked=settings.residency.check_transfers,
    )
