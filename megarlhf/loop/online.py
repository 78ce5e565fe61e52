"""Runs that sample from the policy they train: PPO and the algorithms without a critic."""

from pathlib import Path

from megarlhf import device
from megarlhf.algorithms.catalogue import Algorithm
from megarlhf.config.runs import OnlineRun
from megarlhf.data.order import PromptOrder
from megarlhf.data.prompts import read_prompts
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.engines.generator import Generator, Sampling
from megarlhf.engines.learner import Learner
from megarlhf.engines.scorer import LogprobScorer, ReferenceScorer, RewardModelScorer, ValueScorer
from megarlhf.loop.remote import remote_reference
from megarlhf.loop.roles import Role, roles
from megarlhf.loop.rollouts import Rollouts
from megarlhf.loop.run import Passes, Run, Scorer
from megarlhf.loop.scoring import Report, reward_scores
from megarlhf.loop.workshop import Workshop, learner, reference_snapshot
from megarlhf.models.architecture import Architecture
from megarlhf.models.build import Model
from megarlhf.records.metrics import Metric
from megarlhf.telemetry.report import Reporter
from megarlhf.telemetry.spans import Spans
from megarlhf.weights.exchange import Resharder


def build_online(settings: OnlineRun, algorithm: Algorithm, world_size: int, reporter: Reporter) -> Run:
    """Everything a run needs, with weights loaded. Collective over the world; `settings` passed `preflight`."""
    tokenizer = Tokenizer(settings.actor.model, stop_tokens=settings.rollout.stop_tokens)
    prompts = read_prompts(Path(settings.data.prompts), tokenizer, settings.data)
    cast, workshop = roles(settings), Workshop(world_size)
    reported: list[dict[str, Metric]] = []
    spans = Spans(device.synchronize)
    actor_model = workshop.model(cast["actor"])
    scorers = _actor_scorers(settings, algorithm, actor_model, tokenizer.fingerprint)
    updates = settings.run.steps * settings.algorithm.num_epochs * settings.algorithm.num_minibatches
    actor = learner(actor_model, settings.actor, updates)
    learners = _critic(settings, algorithm, workshop, cast, updates)
    judge = _reward_model(settings, workshop, cast)
    scorers["reward"] = reward_scores(settings.reward, judge, tokenizer.fingerprint, reported.append)
    if "critic" in learners:
        scorers["value"] = ValueScorer(learners["critic"].model, settings.critic.micro_batch_tokens)
    generator = workshop.model(cast["generator"], load=False)
    return Run(
        settings=settings,
        algorithm=algorithm,
        source=_rollouts(settings, tokenizer, prompts, generator, actor, spans, reported.append),
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
        folders={name: cast[name].folder for name in (*learners, "actor")},
        reported=reported,
    )


def _actor_scorers(settings: OnlineRun, algorithm: Algorithm, actor: Model, tokenizer: str) -> dict[str, Scorer]:
    """Log-probs in the training layout, and the reference's (kept here or asked) where the algorithm reads them.

    `tokenizer` is the fingerprint of the actor's.
    """
    temperature, max_tokens = settings.rollout.temperature, settings.actor.micro_batch_tokens
    scorers: dict[str, Scorer] = {"logp": LogprobScorer(actor, "logp_start", temperature, max_tokens)}
    if "logp_reference" in algorithm.reads(settings.algorithm) and settings.reference.url:
        scorers["reference"] = remote_reference(settings.reference, tokenizer, temperature)
    elif "logp_reference" in algorithm.reads(settings.algorithm):
        snapshot = reference_snapshot(actor, settings.actor.model, settings.reference.model)
        scorers["reference"] = ReferenceScorer(
            snapshot, LogprobScorer(actor, "logp_reference", temperature, max_tokens)
        )
    return scorers


def _critic(
    settings: OnlineRun, algorithm: Algorithm, workshop: Workshop, cast: dict[str, Role], updates: int
) -> dict[str, Learner]:
    if algorithm.critic_loss is None:
        return {}
    is_language_model = not Architecture.from_folder(cast["critic"].folder).num_labels
    model = workshop.model(cast["critic"], new_value_head=is_language_model)
    return {"critic": learner(model, settings.critic, updates)}


def _reward_model(settings: OnlineRun, workshop: Workshop, cast: dict[str, Role]) -> RewardModelScorer | None:
    if "reward" not in cast:
        return None
    return RewardModelScorer(workshop.model(cast["reward"]), settings.reward.micro_batch_tokens)


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
