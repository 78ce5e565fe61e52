"""Records of a plan: transfers of boxes, messages of transfers, and the plan itself with its byte counts. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megarlhf.config.settings import Precision
from megarlhf.weights.boxes import Box, LocalTensor, num_elements
from megarlhf.weights.local_map import Key

ITEM_BYTES: dict[Precision, int] = {"float32": 4, "bfloat16": 2}
ALIGN_BYTES = 8
"""Boxes start at multiples of this in a message, so that a part of the buffer can be viewed in any dtype."""

Holding = Mapping[Key, LocalTensor]
"""The local tensors of one rank. Replicas may share one Holding object; planning is quicker when they do."""


@dataclass(frozen=True)
class Transfer:
    """Box `source_box` of a local tensor of one rank goes to `target_box` of a local tensor of a rank."""

    source_rank: int
    target_rank: int
    source: Key
    source_box: Box
    target: Key
    target_box: Box
    dtype: Precision
    """Precision on the wire."""

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return num_elements(self.target_box) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Message:
    """The transfers of one bucket from one rank to one other, laid one after the other in one buffer."""

    source_rank: int
    target_rank: int
    transfers: tuple[Transfer, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, without what alignment adds."""
        return sum(transfer.num_bytes for transfer in self.transfers)

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffer."""
        return sum(aligned(transfer.num_bytes) for transfer in self.transfers)

    def parts(self) -> Iterator[tuple[int, Transfer]]:
        """(offset in the buffer in bytes, transfer)."""
        offset = 0
        for transfer in self.transfers:
            yield offset, transfer
            offset += aligned(transfer.num_bytes)


@dataclass(frozen=True)
class ReshardPlan:
    """All copies within ranks, and the messages between ranks bucket by bucket, for the whole world."""

    source: tuple[Holding, ...]
    target: tuple[Holding, ...]
    copies: tuple[Transfer, ...]
    buckets: tuple[tuple[Message, ...], ...]
    bucket_bytes: int

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages, in order."""
        return tuple(message for bucket in self.buckets for message in bucket)

    @property
    def bytes_sent(self) -> tuple[int, ...]:
        """Bytes each rank sends."""
        return self._per_rank([(message.source_rank, message.num_bytes) for message in self.messages])

    @property
    def bytes_received(self) -> tuple[int, ...]:
        """Bytes each rank receives."""
        return self._per_rank([(message.target_rank, message.num_bytes) for message in self.messages])

    @property
    def bytes_moved(self) -> int:
        """Bytes between ranks, over the whole world."""
        return sum(self.bytes_sent)

    @property
    def peak_extra_bytes(self) -> int:
        """Most bytes of buffers that any rank holds at once, beside its source and target tensors."""
        return max((max(self._per_rank(_buffers(bucket))) for bucket in self.buckets), default=0)

    def _per_rank(self, amounts: list[tuple[int, int]]) -> tuple[int, ...]:
        total = [0] * len(self.target)
        for rank, amount in amounts:
            total[rank] += amount
        return tuple(total)


def _buffers(bucket: tuple[Message, ...]) -> list[tuple[int, int]]:
    """(rank, bytes) of every buffer that one bucket needs, at both ends."""
    return [(rank, message.buffer_bytes) for message in bucket for rank in (message.source_rank, message.target_rank)]


def aligned(num_bytes: int) -> int:
    """Rounded up to the alignment of boxes in a message."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
