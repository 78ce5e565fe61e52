"""From checked settings to a Run: groups, models, weights, engines, in an order that every rank follows alike."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megarlhf import device
from megarlhf.algorithms.catalogue import PPO, Algorithm
from megarlhf.algorithms.schedule import updates_per_step
from megarlhf.config.layout import Layout
from megarlhf.config.settings import Optimizer, PPORun
from megarlhf.data.order import PromptOrder
from megarlhf.data.prompts import read_prompts
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.engines.generator import Generator, Sampling
from megarlhf.engines.learner import Learner
from megarlhf.engines.scorer import LogprobScorer, ReferenceScorer, RewardModelScorer, ValueScorer
from megarlhf.loop.roles import Role, roles
from megarlhf.loop.rollouts import Rollouts
from megarlhf.loop.run import Run, Scorer
from megarlhf.loop.scoring import Scores, reward_scores
from megarlhf.models.architecture import Architecture
from megarlhf.models.build import Model, build_model
from megarlhf.parallel.groups import Groups, build_groups
from megarlhf.records.metrics import Metric
from megarlhf.records.prompts import Prompt
from megarlhf.residency.snapshot import Snapshot
from megarlhf.telemetry.report import Reporter
from megarlhf.telemetry.spans import Spans
from megarlhf.weights.exchange import Resharder
from megarlhf.weights.load import load_weights


@dataclass
class Workshop:
    """Builds models for one world; layouts that are equal share their process groups."""

    world_size: int
    groups: dict[Layout, Groups]

    def model(self, role: Role, *, load: bool = True) -> Model:
        """A model of `role`, with its folder's weights unless `load` is false. Collective over the world."""
        if role.layout not in self.groups:
            self.groups[role.layout] = build_groups(role.layout, self.world_size)
        architecture = Architecture.from_folder(role.folder)
        model = build_model(
            architecture,
            self.groups[role.layout],
            head=role.head,
            dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[role.dtype],
            seed=None,
        )
        if load:
            new_head = role.name == "critic" and not architecture.num_labels
            load_weights(model, role.folder, new_value_head=new_head)
        return model


def build_run(settings: PPORun, world_size: int, reporter: Reporter) -> Run:
    """Everything a run needs, with weights loaded. Collective over the world; `settings` passed `preflight`."""
    spans = Spans(device.synchronize)
    tokenizer = Tokenizer(settings.actor.model, stop_tokens=settings.rollout.stop_tokens)
    prompts = read_prompts(Path(settings.data.prompts), tokenizer, settings.data)
    cast = roles(settings)
    workshop = Workshop(world_size, {})
    actor_model = workshop.model(cast["actor"])
    reference = _reference(settings, actor_model)
    actor = _learner(actor_model, PPO, settings, settings.actor.optimizer, settings.actor.micro_batch_tokens)
    critic_model = workshop.model(cast["critic"])
    critic = _learner(critic_model, PPO, settings, settings.critic.optimizer, settings.critic.micro_batch_tokens)
    reward_model = workshop.model(cast["reward"]) if "reward" in cast else None
    reported: list[dict[str, Metric]] = []
    judge = None if reward_model is None else RewardModelScorer(reward_model, settings.reward.micro_batch_tokens)
    scores = reward_scores(settings.reward, judge, tokenizer.fingerprint, reported.append)
    return Run(
        settings=settings,
        algorithm=PPO,
        source=_rollouts(settings, tokenizer, prompts, workshop.model(cast["generator"], load=False), actor, spans),
        scorers=_scorers(settings, actor_model, reference, critic_model, scores),
        learners={"critic": critic, "actor": actor},
        reporter=reporter,
        spans=spans,
        state=PPO.initial_state(settings.algorithm),
        folders={"actor": cast["actor"].folder, "critic": cast["critic"].folder},
        reported=reported,
    )


def _reference(settings: PPORun, actor: Model) -> Snapshot:
    """The reference's weights, read into the actor's module where they come from a folder of their own."""
    if not settings.reference.model:
        return Snapshot(actor.named_parameters())
    load_weights(actor, settings.reference.model)
    snapshot = Snapshot(actor.named_parameters())
    load_weights(actor, settings.actor.model)
    return snapshot


def _learner(model: Model, algorithm: Algorithm, settings: PPORun, optimizer: Optimizer, max_tokens: int) -> Learner:
    loss = algorithm.critic_loss if model.head == "value" else algorithm.actor_loss

    def with_settings(prediction, tokens, denominators):
        return loss(prediction, tokens, settings.algorithm, denominators)

    return Learner(
        model,
        with_settings,
        optimizer,
        total_updates=settings.run.steps * updates_per_step(settings.algorithm),
        max_tokens=max_tokens,
        temperature=settings.rollout.temperature,
        with_entropy=algorithm.needs_entropy(settings.algorithm),
    )


def _scorers(
    settings: PPORun, actor: Model, reference: Snapshot, critic: Model, scores: Scores
) -> dict[str, Scorer]:
    """In the order they run; the names are those of the time/*_s metrics."""
    logprobs = partial(
        LogprobScorer, actor, temperature=settings.rollout.temperature, max_tokens=settings.actor.micro_batch_tokens
    )
    return {
        "logp": logprobs(field="logp_start"),
        "reference": ReferenceScorer(reference, logprobs(field="logp_reference")),
        "reward": scores,
        "value": ValueScorer(critic, settings.critic.micro_batch_tokens),
    }


def _rollouts(
    settings: PPORun, tokenizer: Tokenizer, prompts: list[Prompt], generator: Model, actor: Learner, spans: Spans
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
    )
