"""Runs that sample from the policy they train: PPO and the algorithms without a critic."""

from pathlib import Path

from megarlhf import device
from megarlhf.algorithms.catalogue import Algorithm
from megarlhf.algorithms.schedule import updates_per_step
from megarlhf.config.runs import OnlineRun, PPORun
from megarlhf.data.order import PromptOrder
from megarlhf.data.prompts import read_prompts
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.engines.generator import Generator, Sampling
from megarlhf.engines.learner import Learner
from megarlhf.engines.scorer import LogprobScorer, RewardModelScorer, ValueScorer
from megarlhf.loop.dynamic import DynamicRollouts
from megarlhf.loop.mixture import pretraining_mix
from megarlhf.loop.remote import remote_reference
from megarlhf.loop.roles import Role, roles
from megarlhf.loop.rollouts import Rollouts
from megarlhf.loop.run import Follower, Mixture, Passes, Run, Scorer, Source
from megarlhf.loop.scoring import Report, Scores, reward_scores
from megarlhf.loop.workshop import Workshop, learner, local_reference
from megarlhf.models.build import Model
from megarlhf.records.metrics import Metric
from megarlhf.residency.average import Average
from megarlhf.telemetry.report import Reporter
from megarlhf.telemetry.spans import Spans
from megarlhf.weights.exchange import Resharder


def build_online(settings: OnlineRun, algorithm: Algorithm, world_size: int, reporter: Reporter) -> Run:
    """Everything a run needs, with weights loaded. Collective over the world; `settings` passed `preflight`."""
    tokenizer = Tokenizer(settings.actor.model, stop_tokens=settings.rollout.stop_tokens)
    prompts = read_prompts(Path(settings.data.prompts), tokenizer, settings.data)
    mixtures = _mixtures(settings, tokenizer)
    cast, workshop = roles(settings), Workshop(world_size, settings.run.seed)
    reported: list[dict[str, Metric]] = []
    spans = Spans(device.synchronize)
    actor_model = workshop.model(cast["actor"])
    scorers, followers = _actor_scorers(settings, algorithm, actor_model, tokenizer.fingerprint)
    updates = settings.run.steps * updates_per_step(settings.algorithm)
    actor = learner(actor_model, settings.actor, updates)
    learners: dict[str, Learner] = {}
    if isinstance(settings, PPORun):
        learners["critic"] = learner(workshop.model(cast["critic"]), settings.critic, updates)
    scores = _scores(settings, workshop, cast, tokenizer.fingerprint, reported.append)
    generator = workshop.model(cast["generator"], load=False)
    source: Source = _rollouts(settings, tokenizer, prompts, generator, actor, spans, reported.append)
    if settings.rollout.extra_rounds:
        source = DynamicRollouts(source, scores, settings.rollout.extra_rounds, reported.append)
    else:
        scorers["reward"] = scores
    if "critic" in learners:
        scorers["value"] = ValueScorer(learners["critic"].model, settings.critic.micro_batch_tokens)
    return Run(
        settings=settings,
        algorithm=algorithm,
        source=source,
        scorers=scorers,
        learners=learners | {"actor": actor},
        num_steps=settings.run.steps,
        passes=Passes(
            settings.algorithm.num_epochs, settings.algorithm.num_minibatches, settings.algorithm.target_kl
        ),
        temperature=settings.rollout.temperature,
        reporter=reporter,
        spans=spans,
        state=algorithm.initial_state(settings.algorithm),
        roles={name: cast[name] for name in (*learners, "actor")},
        mixtures=mixtures,
        followers=followers,
        judge=scores,
        reported=reported,
    )


def _mixtures(settings: OnlineRun, tokenizer: Tokenizer) -> dict[str, Mixture]:
    if not isinstance(settings, PPORun) or not settings.pretraining.coef:
        return {}
    return {"actor": pretraining_mix(settings.pretraining, tokenizer, settings.run.seed)}


def _actor_scorers(
    settings: OnlineRun, algorithm: Algorithm, actor: Model, tokenizer: str
) -> tuple[dict[str, Scorer], tuple[Follower, ...]]:
    """Log-probs in the training layout, and the reference's (kept here or asked) where the algorithm reads them; and
    the averages that move with the actor. `tokenizer` is the fingerprint of the actor's.
    """
    temperature, max_tokens = settings.rollout.temperature, settings.actor.micro_batch_tokens
    scorers: dict[str, Scorer] = {"logp": LogprobScorer(actor, "logp_start", temperature, max_tokens)}
    followers: tuple[Follower, ...] = ()
    if settings.actor.average_decay:
        average = Average(actor.named_parameters(), settings.actor.average_decay)
        followers = (Follower(average, "actor", "hf_average"),)
    if "logp_reference" not in algorithm.reads(settings.algorithm):
        return scorers, followers
    if settings.reference.url:
        scorers["reference"] = remote_reference(settings.reference, tokenizer, temperature)
        return scorers, followers
    reference = local_reference(settings.reference, settings.actor, actor, temperature)
    scorers["reference"] = reference.scorer
    return scorers, (*followers, *reference.followers)


def _scores(
    settings: OnlineRun, workshop: Workshop, cast: dict[str, Role], tokenizer: str, report: Report
) -> Scores:
    judge = None
    if "reward" in cast:
        judge = RewardModelScorer(workshop.model(cast["reward"]), settings.reward.micro_batch_tokens)
    return reward_scores(settings.reward, judge, tokenizer, report)


def _rollouts(
    settings: OnlineRun,
    tokenizer: Tokenizer,
    prompts: list,
    generator: Model,
    actor: Learner,
    spans: Spans,
    report: Report,
) -> Rollouts:
    rollout = settings.rollout
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
        resharder=Resharder(actor.model, generator),
        spans=spans,
        report=report,
    )
