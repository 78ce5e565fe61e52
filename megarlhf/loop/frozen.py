"""One batch that never changes, for computing the same thing in several ways: the recipe's rows, with seeded numbers.

Its texts are real: sampled from the recipe's actor, or read from its data set. What another model would have said about
them (scores, values, log-probs of the reference and of an older policy) is noise, so that every term of a loss counts.
"""

from pathlib import Path

import torch
from torch import Tensor

from megarlhf.algorithms.catalogue import Algorithm
from megarlhf.config.layout import Layout
from megarlhf.config.runs import AnyRun, OnlineRun
from megarlhf.config.verification import Verification
from megarlhf.data.batches import corpus_experience
from megarlhf.data.order import PromptOrder
from megarlhf.data.prompts import read_prompts
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.engines.generator import Generator, Request, Sampling
from megarlhf.engines.scorer import LogprobScorer
from megarlhf.loop.reading import reading
from megarlhf.loop.roles import Role
from megarlhf.loop.rollouts import experience_of
from megarlhf.models.architecture import Architecture
from megarlhf.models.build import Model, build_model
from megarlhf.parallel.groups import build_groups
from megarlhf.records.experience import Experience, scatter_rows
from megarlhf.records.prompts import siblings
from megarlhf.records.seeds import derive_seed
from megarlhf.records.shards import WHOLE
from megarlhf.weights.load import load_weights

_OLDER_NATS, _REFERENCE_NATS = 0.05, 0.2
"""How far the older policy and the reference are from the actor: standard deviation of a token's log-prob."""


def frozen_batch(settings: AnyRun, algorithm: Algorithm, role: Role, options: Verification) -> Experience:
    """The batch as the losses read it, with credit assigned. For a world of one rank; `role` is the first one trained.

    Raises DataError when the recipe's prompts or data set cannot be read.
    """
    tokenizer = Tokenizer(role.folder)
    model = _whole_model(role) if role.head == "vocabulary" else None
    if isinstance(settings, OnlineRun):
        assert model is not None, "what samples is a language model"
        batch = _sampled(settings, options, tokenizer, model)
    else:
        how = reading(settings)
        examples = how.read(settings.data, tokenizer, "data")[: options.prompts]
        batch = algorithm.before_scoring(corpus_experience(examples, how.mask), settings.algorithm)
    batch = _with_noise(batch, settings, model)
    if algorithm.credit is not None:
        batch, _, _ = algorithm.credit(batch, settings.algorithm, algorithm.initial_state(settings.algorithm), WHOLE)
    return algorithm.prepare_minibatch(batch, settings.algorithm, WHOLE)


def temperature_of(settings: AnyRun) -> float:
    """What divides the logits of the policy."""
    return settings.rollout.temperature if isinstance(settings, OnlineRun) else 1.0


def _whole_model(role: Role) -> Model:
    model = build_model(
        Architecture.from_folder(role.folder), build_groups(Layout(), 1), head=role.head, dtype=torch.float32, seed=None
    )
    load_weights(model, role.folder)
    return model


def _sampled(settings: OnlineRun, options: Verification, tokenizer: Tokenizer, model: Model) -> Experience:
    rollout = settings.rollout
    prompts = read_prompts(Path(settings.data.prompts), tokenizer, settings.data)
    order = PromptOrder(len(prompts), min(options.prompts, len(prompts)), settings.run.seed, settings.data.shuffle)
    samples = siblings([prompts[index] for index in order.batch(0)], rollout.samples_per_prompt)
    new_tokens = min(options.new_tokens, rollout.max_new_tokens)
    sampling = Sampling(
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        max_new_tokens=new_tokens,
        min_new_tokens=min(rollout.min_new_tokens, new_tokens),
        stop_ids=tokenizer.stop_ids,
        seed=settings.run.seed,
        step=0,
    )
    requests = [Request(sample.prompt.token_ids, sample.prompt.row_id, sample.sample) for sample in samples]
    completions = Generator(model, max_slots=rollout.max_slots).sample(requests, sampling)
    return experience_of(samples, completions, tokenizer)


def _with_noise(batch: Experience, settings: AnyRun, model: Model | None) -> Experience:
    """Log-probs around `model`'s, values, and scores where the data set has none."""
    generator = torch.Generator().manual_seed(derive_seed(settings.run.seed, "verification"))
    counts = batch.mask.sum(1).tolist()

    def noise(size: float) -> Tensor:
        return scatter_rows([size * torch.randn(count, generator=generator) for count in counts], batch.mask)

    if model is not None:
        scorer = LogprobScorer(model, "logp_start", temperature_of(settings), max_tokens=1)
        batch = scorer.annotate(batch)
        logp = batch.logp_start
        batch = batch.replace(
            logp_start=logp + noise(_OLDER_NATS),
            logp_rollout=logp if batch.logp_rollout is None else batch.logp_rollout,
            logp_reference=logp + noise(_REFERENCE_NATS),
        )
    score = torch.randn(batch.num_rows, generator=generator) if batch.score is None else batch.score
    return batch.replace(value=noise(1.0), score=score)
