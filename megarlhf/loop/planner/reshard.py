"""What moving the actor's weights from the training to the generation layout costs, read off the plan that is run."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from megarlhf.config.settings import Precision
from megarlhf.loop.planner.models import PlannedModel
from megarlhf.weights.plan import BUCKET_BYTES, reshard_plan, validate
from megarlhf.weights.transfers import ReshardPlan

Link = Literal["node", "network"]
"""Between GPUs of one node, or of two."""


@dataclass(frozen=True)
class ReshardSummary:
    """One reshard."""

    copied_bytes: tuple[int, ...]
    """By rank: what it holds already, on the wire's precision."""
    sent: dict[Link, tuple[int, ...]]
    """Bytes by kind of link and rank."""
    received: dict[Link, tuple[int, ...]]
    buffer_bytes: tuple[int, ...]
    """By rank: what it sends, with what aligning the boxes in a message adds."""
    num_messages: int
    num_buckets: int
    largest_bucket_bytes: int
    """Most bytes of buffers at one end of one bucket."""
    peak_extra_bytes: int
    """Most bytes of buffers that a rank holds at once, as sender and receiver."""
    pairs: dict[tuple[int, int], int]
    """Bytes by (sender, receiver)."""
    is_validated: bool
    """Every element of the target was checked to be written exactly once, from where it is held."""

    @property
    def bytes_moved(self) -> int:
        """Between ranks, over the whole world."""
        return sum(self.pairs.values())

    def busiest(self, link: Link) -> int:
        """Bytes that the busiest end of a kind of link sends or receives."""
        return max(max(self.sent[link]), max(self.received[link]))


def reshard_summary(
    source: PlannedModel, target: PlannedModel, world_size: int, gpus_per_node: int, *, check: bool = False
) -> ReshardSummary:
    """The plan of one model between two layouts, as `weights.exchange.Resharder` makes it.

    `check` validates it (raises AssertionError, which would be our mistake), which takes a third longer.
    """
    narrow: Precision = "bfloat16" if "bfloat16" in (source.dtype, target.dtype) else "float32"
    plan = reshard_plan(
        source.architecture, source.head, source.layout, target.layout, world_size, BUCKET_BYTES, narrow
    )
    if check:
        validate(plan)
    return summary(plan, gpus_per_node, is_validated=check)


def summary(plan: ReshardPlan, gpus_per_node: int, *, is_validated: bool = False) -> ReshardSummary:
    """Any plan's numbers; ranks `gpus_per_node` * k and following share a node."""
    world_size, pairs = len(plan.target), defaultdict[tuple[int, int], int](int)
    copied = [0] * world_size
    for transfer in plan.copies:
        copied[transfer.target_rank] += transfer.num_bytes
    largest, buffers = 0, [0] * world_size
    for bucket in plan.buckets:
        ends: dict[tuple[str, int], int] = defaultdict(int)
        for message in bucket:
            pairs[message.source_rank, message.target_rank] += message.num_bytes
            buffers[message.source_rank] += message.buffer_bytes
            ends["send", message.source_rank] += message.buffer_bytes
            ends["receive", message.target_rank] += message.buffer_bytes
        largest = max(largest, *ends.values())
    sent: dict[Link, list[int]] = {"node": [0] * world_size, "network": [0] * world_size}
    received: dict[Link, list[int]] = {"node": [0] * world_size, "network": [0] * world_size}
    for (giver, taker), num_bytes in pairs.items():
        link: Link = "node" if giver // gpus_per_node == taker // gpus_per_node else "network"
        sent[link][giver] += num_bytes
        received[link][taker] += num_bytes
    return ReshardSummary(
        copied_bytes=tuple(copied),
        sent={link: tuple(amounts) for link, amounts in sent.items()},
        received={link: tuple(amounts) for link, amounts in received.items()},
        buffer_bytes=tuple(buffers),
        num_messages=len(plan.messages),
        num_buckets=len(plan.buckets),
        largest_bucket_bytes=largest,
        peak_extra_bytes=plan.peak_extra_bytes,
        pairs=dict(pairs),
        is_validated=is_validated,
    )
