"""What a model is trained on: an algorithm's loss with its settings filled in, as the learner takes it."""

from megarlhf.algorithms.catalogue import Algorithm
from megarlhf.engines.learner import Objective
from megarlhf.models.names import Head


def objective(algorithm: Algorithm, settings: object, head: Head, temperature: float = 1.0) -> Objective:
    """The algorithm's loss for a model with this head, with the settings filled in."""
    loss = algorithm.critic_loss if head == "value" else algorithm.actor_loss
    assert loss is not None, f"{algorithm.name} has no loss for a model with a {head} head"

    def with_settings(prediction, tokens, denominators):
        return loss(prediction, tokens, settings, denominators)

    return Objective(
        with_settings,
        temperature=temperature,
        with_entropy=algorithm.needs_entropy(settings),
        keeps_groups=algorithm.keeps_groups,
        value_at=algorithm.value_at,
    )
