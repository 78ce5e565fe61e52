"""How likely a model finds each of a few tokens after a context: an opinion without sampling."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megarlhf.data.questions import Choice
from megarlhf.engines.pipeline import MicroBatch
from megarlhf.engines.scorer import score_rows
from megarlhf.models.build import Model
from megarlhf.models.forward import vocabulary_logprobs
from megarlhf.records.experience import Experience


@dataclass(frozen=True)
class ChoiceScorer:
    """Log-probs of the options of choices, with one forward per context."""

    model: Model
    max_tokens: int
    """Tokens packed into one micro-batch."""

    def logps(self, choices: Sequence[Choice]) -> list[torch.Tensor]:
        """For each choice, in order, [options] float32: log-probs among the whole vocabulary, in nats, temperature 1.

        Collective over the world; every rank passes the same choices.
        """
        if not choices:
            return []
        count = len(choices)
        rows = Experience.from_completions(
            [choice.context_ids for choice in choices],
            [()] * count,
            None,
            row_id=range(count),
            group=range(count),
            finished=[True] * count,
        )

        def head(hidden: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
            last = batch.packed.last_positions
            options = [choices[row].option_ids for row in batch.rows]
            repeats = torch.tensor([len(ids) for ids in options], dtype=torch.int64, device=last.device)
            targets = torch.tensor([i for ids in options for i in ids], dtype=torch.int64, device=last.device)
            positions = last.repeat_interleave(repeats)
            return vocabulary_logprobs(self.model, hidden, positions, targets, 1.0, with_entropy=False)[0]

        counts = [len(choice.option_ids) for choice in choices]
        return list(score_rows(self.model, rows, counts, self.max_tokens, head, reads="rows").split(counts))
