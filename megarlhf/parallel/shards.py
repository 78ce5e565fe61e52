"""The ranks that hold one shard of a step's batch, and those at the same place in the others."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.parallel.rows import gather_alike, gather_objects
from megarlhf.records.shards import Shard


@dataclass(frozen=True, eq=False)
class RankedShard(Shard):
    """The shard that this rank holds."""

    ranks: dist.ProcessGroup | None = None
    """Who holds it; None: everybody."""
    peers: dist.ProcessGroup | None = None
    """One rank of every shard, by shard; None: there is one shard."""

    def sum(self, values: Tensor) -> Tensor:
        """See `Shard.sum`: each rank adds up in the order of the shards."""
        return self._all(values).sum(0)

    def largest(self, values: Tensor) -> Tensor:
        """See `Shard.largest`."""
        return self._all(values).amax(0)

    def objects(self, value: Any) -> list[Any]:
        """What each shard says, by shard; what pickle can take. Collective over the shards."""
        return gather_objects(value, self.peers) if self.count > 1 else [value]

    def _all(self, values: Tensor) -> Tensor:
        """[count, ...]"""
        own = values.double().cpu()
        return torch.stack(gather_alike(own, self.peers)) if self.count > 1 else own[None]


EVERYBODY = RankedShard()
"""All ranks, where each holds the whole batch."""
