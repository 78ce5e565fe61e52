"""A step's batch may be kept in shards: a rank then holds the rows of one, and sums over the others where it must."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """Which part of a batch is held here, and a way to the others. As it is: the whole batch, and no others."""

    number: int = 0
    count: int = 1
    """Shards that ranks of their own hold."""

    def sum(self, values: Tensor) -> Tensor:
        """`values` (numbers of this shard; shape and dtype alike everywhere) summed over all shards, float64 on the
        host; the same bits on every rank. Collective over the shards."""
        return values.double().cpu()

    def largest(self, values: Tensor) -> Tensor:
        """Likewise the largest of each."""
        return values.double().cpu()

    def part(self, num_rows: int) -> range:
        """This shard's run of `num_rows` consecutive rows (or prompts): runs are of one length, or differ by one."""
        return range(self.number * num_rows // self.count, (self.number + 1) * num_rows // self.count)


WHOLE = Shard()
"""Of a batch that is held in one piece."""
