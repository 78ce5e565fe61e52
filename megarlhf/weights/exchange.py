"""Moving weights between two layouts of one model, byte for byte, in buckets of bounded size.

The plan is made once; each run walks it. Beside the two models a rank holds at most one bucket's buffers. Ranks that
have only processors, and are on one machine, pass buckets through memory that they share; others send messages.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megarlhf import device
from megarlhf.models.build import Model
from megarlhf.models.lora import base_parameters, merged_parameters
from megarlhf.parallel.meeting import Meeting
from megarlhf.parallel.shared_memory import open_boxes
from megarlhf.weights.boxes import num_elements, slices
from megarlhf.weights.checksum import require_equal_weights
from megarlhf.weights.load import assert_same_parameters
from megarlhf.weights.local_map import Key
from megarlhf.weights.plan import BUCKET_BYTES, reshard_plan
from megarlhf.weights.transfers import Message, ReshardPlan, Transfer, aligned

SHARED_BUCKET_BYTES = 8 * 2**20
"""Of a bucket in shared memory, which its sender's and its receiver's processors still have in their caches."""
LETTER_BYTES = 2**16
"""Transfers of this size are sent by themselves, where possible from and to where they live."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ReshardReport:
    """What one run moved; bytes and messages are over the whole world, the rest is this rank's."""

    bytes_moved: int
    num_messages: int
    peak_extra_bytes: int
    """Most bytes of buffers that were held at once."""
    duration_s: float


class Resharder:
    """Carries the weights of `source` over to `target`: the same architecture and head in two layouts of one world.

    The target's dtype may differ; what crosses between ranks is then the narrower of the two. The target has no
    adapters: those of the source arrive merged into its weights.
    """

    def __init__(
        self,
        source: Model,
        target: Model,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        shares_memory: bool = True,
        letter_bytes: int = LETTER_BYTES,
    ):
        """Collective over the world. `bucket_bytes` bounds the buffers; ranks of one machine may share smaller ones,
        unless `shares_memory` is false. In messages, transfers of `letter_bytes` and more are sent by themselves."""
        assert source.architecture == target.architecture, "one architecture in two layouts"
        assert source.head == target.head, "one head in two layouts"
        self.source, self.target = source, target
        self.group = source.groups.world
        self.rank = dist.get_rank(self.group)
        self.device = next(iter(source.named_parameters().values())).device
        self._letter_bytes = letter_bytes
        self._boxes = None
        if shares_memory and device.is_host() and self.group.size() > 1:
            # Two halves in turn: while one is read the next bucket is written.
            half, size = aligned(min(bucket_bytes, 2 * SHARED_BUCKET_BYTES) // 2), self.group.size()
            boxes = open_boxes(self.group, 2 * half + Meeting.num_bytes(size))
            if boxes is not None:
                bucket_bytes = half
                self._boxes = [box[: 2 * half] for box in boxes]
                self._meeting = Meeting(self.rank, [box[2 * half :] for box in boxes])
        self.plan = reshard_plan(
            source.architecture,
            source.head,
            source.groups.layout,
            target.groups.layout,
            self.group.size(),
            bucket_bytes,
            "bfloat16" if torch.bfloat16 in (source.dtype, target.dtype) else "float32",
        )
        assert_same_parameters(self.plan.source[self.rank], base_parameters(source))
        assert_same_parameters(self.plan.target[self.rank], target.named_parameters())

    def run(self, *, tensors: Mapping[Key, torch.Tensor] | None = None, is_checked: bool = False) -> ReshardReport:
        """Overwrite the target's weights (collective over the world). `is_checked` compares checksums afterwards.

        `tensors` are what to carry over, by the keys of the source's own parameters and shaped like them (an average
        of its weights, say); by default the source's weights, adapters merged in. Padding rows of the target's
        vocabulary are left as they are. Raises CheckpointError, on every rank, when checksums differ.
        """
        start = time.perf_counter()
        tensors = merged_parameters(self.source) if tensors is None else tensors
        parameters = self.target.named_parameters()
        if self._boxes is None:
            peak = exchange(self.plan, tensors, parameters, self.group, self.device, self._letter_bytes)
        else:
            peak = exchange_shared(self.plan, tensors, parameters, self.group, self._boxes, self._meeting)
        self.target.weights_changed()
        if is_checked:
            require_equal_weights(self.source, self.target, self.group, tensors=tensors)
        seconds = time.perf_counter() - start
        return ReshardReport(self.plan.bytes_moved, len(self.plan.messages), peak, seconds)


@torch.no_grad()
@device.labelled("communicate")
def exchange(
    plan: ReshardPlan,
    source: Mapping[Key, torch.Tensor],
    target: Mapping[Key, torch.Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
    letter_bytes: int = LETTER_BYTES,
) -> int:
    """Carry out a plan (collective over `group`, whose ranks are the plan's). Values are cast to the target's dtype.

    Buffers live on `device`, where the group communicates; source and target tensors may live elsewhere. Returns the
    most bytes of buffers that this rank held at once.
    """
    rank, peak = dist.get_rank(group), 0
    _copy_held(plan, rank, source, target)
    if plan.buckets:
        # NCCL opens its communicator at the group's first operation, in which every rank must take part.
        dist.barrier(group)
    for bucket in plan.buckets:
        mine = [message for message in bucket if rank in (message.source_rank, message.target_rank)]
        letters = [letter for message in mine for letter in _letters(message, letter_bytes)]
        peak = max(peak, _walk(letters, source, target, group, device))
    return peak


@device.labelled("communicate")
@torch.no_grad()
def exchange_shared(
    plan: ReshardPlan,
    source: Mapping[Key, torch.Tensor],
    target: Mapping[Key, torch.Tensor],
    group: dist.ProcessGroup,
    boxes: Sequence[torch.Tensor],
    meeting: Meeting,
) -> int:
    """`exchange` through the ranks' boxes in shared memory, each as large as two buckets of the plan, or larger.

    A rank packs its part of a bucket into one half of its box; once all have come to the `meeting`, each unpacks what
    is meant for it, and packs the next bucket into the other half. Returns the bytes of its own box that this rank
    used, and of others' that it read, at once.
    """
    rank, half, peak, held = dist.get_rank(group), len(boxes[0]) // 2, 0, [0, 0]
    _copy_held(plan, rank, source, target)
    dist.barrier(group)  # the longest wait, which a meeting would spend awake
    for number, bucket in enumerate(plan.buckets):
        start, held[number % 2] = half * (number % 2), 0
        places = [
            (message, place) for message, place in _places(bucket) if rank in (message.source_rank, message.target_rank)
        ]
        for message, place in places:
            held[number % 2] += message.buffer_bytes
            if message.source_rank == rank:
                _pack(message, source, boxes[rank][start + place :])
        # Who is here has also unpacked the bucket before, so that its half may be written again.
        meeting.wait()
        for message, place in places:
            if message.target_rank == rank:
                _unpack(message, boxes[message.source_rank][start + place :], target)
        peak = max(peak, sum(held))
    meeting.wait()
    return peak


def _places(bucket: Sequence[Message]) -> Iterator[tuple[Message, int]]:
    """Each message and where in its sender's half it begins: one after the other."""
    used: dict[int, int] = defaultdict(int)
    for message in bucket:
        yield message, used[message.source_rank]
        used[message.source_rank] += message.buffer_bytes


def _copy_held(
    plan: ReshardPlan, rank: int, source: Mapping[Key, torch.Tensor], target: Mapping[Key, torch.Tensor]
) -> None:
    """What this rank has already. Local."""
    for transfer in plan.copies:
        if transfer.target_rank == rank:
            held = source[transfer.source][slices(transfer.source_box)]
            target[transfer.target][slices(transfer.target_box)].copy_(held)


def _walk(
    letters: list[Message],
    source: Mapping[Key, torch.Tensor],
    target: Mapping[Key, torch.Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
) -> int:
    """This rank's letters of one bucket: send and receive all, then unpack. Returns the bytes of their buffers."""
    rank, operations, arriving, held = dist.get_rank(group), [], [], 0
    for message in letters:
        is_sent = message.source_rank == rank
        buffer = _place(message, source if is_sent else target, is_sent, device)
        if buffer is None:
            buffer = torch.empty(message.buffer_bytes, dtype=torch.uint8, device=device)
            held += buffer.numel()
            if is_sent:
                _pack(message, source, buffer)
            else:
                arriving.append((message, buffer))
        peer = dist.get_global_rank(group, message.target_rank if is_sent else message.source_rank)
        operations.append(dist.P2POp(dist.isend if is_sent else dist.irecv, buffer, peer, group))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    for message, buffer in arriving:
        _unpack(message, buffer, target)
    return held


def _letters(message: Message, letter_bytes: int) -> Iterator[Message]:
    """A message as its ends send it: each large transfer by itself, so that it may need no buffer, then the others."""
    for transfer in message.transfers:
        if transfer.num_bytes >= letter_bytes:
            yield replace(message, transfers=(transfer,))
    small = tuple(transfer for transfer in message.transfers if transfer.num_bytes < letter_bytes)
    if small:
        yield replace(message, transfers=small)


def _place(
    letter: Message, tensors: Mapping[Key, torch.Tensor], is_sent: bool, device: torch.device
) -> torch.Tensor | None:
    """Where a single transfer lies as it travels: contiguous, in its dtype, on `device`; None where a buffer is needed.

    Each end decides for itself. Only parameters are sent from where they are: they live anyway, merged weights do not.
    """
    if len(letter.transfers) > 1:
        return None
    (transfer,) = letter.transfers
    tensor = tensors[transfer.source if is_sent else transfer.target]
    part = tensor.data[slices(transfer.source_box if is_sent else transfer.target_box)]
    is_alive = isinstance(tensor, torch.nn.Parameter) or not is_sent
    fits = part.is_contiguous() and part.dtype == DTYPES[transfer.dtype] and part.device == device
    return part.view(-1).view(torch.uint8) if is_alive and fits else None


def _pack(message: Message, source: Mapping[Key, torch.Tensor], buffer: torch.Tensor) -> None:
    for offset, transfer in message.parts():
        _view(buffer, offset, transfer).copy_(source[transfer.source][slices(transfer.source_box)])


def _unpack(message: Message, buffer: torch.Tensor, target: Mapping[Key, torch.Tensor]) -> None:
    for offset, transfer in message.parts():
        target[transfer.target][slices(transfer.target_box)].copy_(_view(buffer, offset, transfer))


def _view(buffer: torch.Tensor, offset: int, transfer: Transfer) -> torch.Tensor:
    """A transfer's part of a buffer, in its dtype and shape."""
    dtype = DTYPES[transfer.dtype]
    part = buffer[offset : offset + num_elements(transfer.target_box) * dtype.itemsize].view(dtype)
    return part.view([stop - start for start, stop in transfer.target_box])
