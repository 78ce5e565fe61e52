"""Which rows of a data set a step uses: a pure function of (seed, step), so that a resumed run finds its place."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megarlhf.errors import DataError


@dataclass(frozen=True)
class PromptOrder:
    """Batches of prompt numbers. Epochs follow each other without a gap: a batch may end one and begin the next.

    Every prompt is used once an epoch. So fewer prompts than `batch_size` are used several times in a batch, and a
    batch across the end of an epoch may hold a prompt twice (`occurrences` tells the uses apart).
    """

    num_prompts: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_prompts < 1 or self.batch_size < 1:
            raise DataError(
                f"batches of {self.batch_size} out of {self.num_prompts} rows: both must be at least 1; "
                "look at batch_size and at the data file"
            )

    def batch(self, step: int) -> list[int]:
        """Prompt numbers of step `step`, counted from 0."""
        start = step * self.batch_size
        first_epoch, last_epoch = start // self.num_prompts, (start + self.batch_size - 1) // self.num_prompts
        indices = [index for epoch in range(first_epoch, last_epoch + 1) for index in self._epoch(epoch)]
        offset = start - first_epoch * self.num_prompts
        return indices[offset : offset + self.batch_size]

    def epochs(self, step: int) -> list[int]:
        """The epoch, counted from 0, in which each entry of `batch(step)` is used."""
        start = step * self.batch_size
        return [position // self.num_prompts for position in range(start, start + self.batch_size)]

    def steps_of(self, epochs: int) -> int:
        """Whole batches in `epochs` epochs; batches run on over the ends of epochs. At least 1."""
        return max(1, epochs * self.num_prompts // self.batch_size)

    def _epoch(self, epoch: int) -> list[int]:
        indices = list(range(self.num_prompts))
        if self.shuffle:
            # A text seed is hashed with SHA-512: the same order everywhere, and (1, 23) is not (12, 3).
            random.Random(f"prompts {self.seed} {epoch}").shuffle(indices)
        return indices


def occurrences(indices: Sequence[int]) -> list[int]:
    """How often each entry came before in `indices`: [7, 3, 7] -> [0, 0, 1].

    Sampling noise is keyed by (seed, step, row, sample): the uses of one row in one step need different samples.
    """
    seen: Counter[int] = Counter()
    numbers = []
    for index in indices:
        numbers.append(seen[index])
        seen[index] += 1
    return numbers
