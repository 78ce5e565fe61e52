"""Language modelling mixed into a policy's updates: PPO-ptx (Ouyang et al., 2022, equation 2).

Every update adds coef * the mean negative log-prob of a batch of a corpus, with gradients summed like any other part.
"""

from dataclasses import dataclass

from megarlhf.algorithms.catalogue import SFT
from megarlhf.config.algorithms import SFT as SFTSettings
from megarlhf.config.settings import Pretraining
from megarlhf.data.batches import CorpusBatches
from megarlhf.data.corpus import read_demonstrations
from megarlhf.data.order import PromptOrder
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.engines.learner import Objective, Part
from megarlhf.records.shards import WHOLE, Shard


@dataclass(frozen=True)
class PretrainingMix:
    """A batch of the corpus for every update."""

    batches: CorpusBatches
    objective: Objective
    shard: Shard = WHOLE
    """Whose ranks are given a part of each batch."""

    def part(self, update: int) -> Part:
        """What is mixed into the learner's update number `update`."""
        batch = self.batches.next_batch(update)
        return Part(batch.select(self.shard.part(batch.num_rows)), self.objective)


def pretraining_mix(settings: Pretraining, tokenizer: Tokenizer, seed: int, shard: Shard = WHOLE) -> PretrainingMix:
    """The mixture that the settings describe. Its metric is `pretraining/loss`, nats per token."""
    # It has every field of a Corpus that reading demonstrations asks for.
    examples = read_demonstrations(settings, tokenizer, "pretraining")  # type: ignore[arg-type]
    order = PromptOrder(len(examples), settings.batch_size, seed, settings.shuffle)

    def loss(prediction, tokens, denominators):
        value, metrics = SFT.actor_loss(prediction, tokens, SFTSettings(), denominators)
        return settings.coef * value, {"pretraining/loss": metrics["loss/sft_avg"]}

    return PretrainingMix(CorpusBatches(examples, order, "response"), Objective(loss), shard)
