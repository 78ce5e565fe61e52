"""What a model is trained on: an algorithm's loss with its settings filled in, as the learner takes it."""

from dataclasses import replace
from math import inf

from megarlhf.algorithms.catalogue import Algorithm
from megarlhf.algorithms.means import mean
from megarlhf.engines.learner import Objective
from megarlhf.models.names import Head
from megarlhf.records.metrics import Maximum, Metric
from megarlhf.records.tokens import Prediction, TokenBatch


def objective(
    algorithm: Algorithm, settings: object, head: Head, temperature: float = 1.0, *, is_start: bool = False
) -> Objective:
    """The algorithm's loss for a model with this head, with the settings filled in.

    `is_start`: a policy is updated once a step, so what it predicts in the update is what it said before it (see
    `config.runs.update_says_start`). The loss reads it there as `logp_old`, and adds the `start_metrics`.
    """
    is_start = is_start and head == "vocabulary"
    loss = algorithm.critic_loss if head == "value" else algorithm.actor_loss
    assert loss is not None, f"{algorithm.name} has no loss for a model with a {head} head"

    def with_settings(prediction, tokens, denominators):
        if not is_start:
            return loss(prediction, tokens, settings, denominators)
        started = replace(tokens, logp_old=prediction.value.detach())
        total, metrics = loss(prediction, started, settings, denominators)
        return total, metrics | start_metrics(prediction, tokens)

    return Objective(
        with_settings,
        temperature=temperature,
        with_entropy=algorithm.needs_entropy(settings) or is_start,
        keeps_groups=algorithm.keeps_groups,
        value_at=algorithm.value_at,
    )


def start_metrics(prediction: Prediction, tokens: TokenBatch) -> dict[str, Metric]:
    """What is told of the policy before a step's update, from the predictions of that update:

    objective/entropy     mean exact entropy of its distributions, nats per token
    rollout/logp_gap_max  largest difference between the sampler's log-prob and its own, nats
    """
    found: dict[str, Metric] = {}
    if prediction.entropy is not None:
        found["objective/entropy"] = mean(prediction.entropy.detach())
    if tokens.logp_rollout is not None:
        gaps = (tokens.logp_rollout - prediction.value.detach()).abs()
        found["rollout/logp_gap_max"] = Maximum(gaps.max() if gaps.numel() else -inf)
    return found
