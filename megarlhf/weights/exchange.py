"""Moving weights between two layouts of one model, byte for byte, in buckets of bounded size.

The plan is made once; each run walks it. Beside the two models a rank holds at most one bucket's buffers.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarlhf.device import labelled
from megarlhf.models.build import Model
from megarlhf.models.lora import base_parameters, merged_parameters
from megarlhf.weights.boxes import num_elements, slices
from megarlhf.weights.checksum import require_equal_weights
from megarlhf.weights.load import assert_same_parameters
from megarlhf.weights.local_map import Key
from megarlhf.weights.plan import BUCKET_BYTES, reshard_plan
from megarlhf.weights.transfers import Message, ReshardPlan, Transfer

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

    def __init__(self, source: Model, target: Model, bucket_bytes: int = BUCKET_BYTES):
        assert source.architecture == target.architecture, "one architecture in two layouts"
        assert source.head == target.head, "one head in two layouts"
        self.source, self.target = source, target
        self.group = source.groups.world
        self.rank = dist.get_rank(self.group)
        self.device = next(iter(source.named_parameters().values())).device
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
        peak = exchange(self.plan, tensors, self.target.named_parameters(), self.group, self.device)
        self.target.weights_changed()
        if is_checked:
            require_equal_weights(self.source, self.target, self.group, tensors=tensors)
        seconds = time.perf_counter() - start
        return ReshardReport(self.plan.bytes_moved, len(self.plan.messages), peak, seconds)


@torch.no_grad()
@labelled("communicate")
def exchange(
    plan: ReshardPlan,
    source: Mapping[Key, torch.Tensor],
    target: Mapping[Key, torch.Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
) -> int:
    """Carry out a plan (collective over `group`, whose ranks are the plan's). Values are cast to the target's dtype.

    Buffers live on `device`, where the group communicates; source and target tensors may live elsewhere. Returns the
    most bytes of buffers that this rank held at once.
    """
    rank, peak = dist.get_rank(group), 0
    for transfer in plan.copies:
        if transfer.target_rank == rank:
            held = source[transfer.source][slices(transfer.source_box)]
            target[transfer.target][slices(transfer.target_box)].copy_(held)
    if plan.buckets:
        # NCCL opens its communicator at the group's first operation, in which every rank must take part.
        dist.barrier(group)
    for bucket in plan.buckets:
        mine = [message for message in bucket if rank in (message.source_rank, message.target_rank)]
        peak = max(peak, _walk(mine, source, target, group, device))
    return peak


def _walk(
    bucket: list[Message],
    source: Mapping[Key, torch.Tensor],
    target: Mapping[Key, torch.Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
) -> int:
    """This rank's messages of one bucket: send and receive all, then unpack. Returns the bytes of their buffers."""
    rank, operations, arriving, held = dist.get_rank(group), [], [], 0
    for message in bucket:
        is_sent = message.source_rank == rank
        buffer = _pack(message, source, device) if is_sent else _buffer(message, device)
        held += buffer.numel()
        peer = dist.get_global_rank(group, message.target_rank if is_sent else message.source_rank)
        operations.append(dist.P2POp(dist.isend if is_sent else dist.irecv, buffer, peer, group))
        if not is_sent:
            arriving.append((message, buffer))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    for message, buffer in arriving:
        for offset, transfer in message.parts():
            target[transfer.target][slices(transfer.target_box)].copy_(_view(buffer, offset, transfer))
    return held


def _buffer(message: Message, device: torch.device) -> torch.Tensor:
    return torch.empty(message.buffer_bytes, dtype=torch.uint8, device=device)


def _pack(message: Message, source: Mapping[Key, torch.Tensor], device: torch.device) -> torch.Tensor:
    buffer = _buffer(message, device)
    for offset, transfer in message.parts():
        _view(buffer, offset, transfer).copy_(source[transfer.source][slices(transfer.source_box)])
    return buffer


def _view(buffer: torch.Tensor, offset: int, transfer: Transfer) -> torch.Tensor:
    """A transfer's part of a buffer, in its dtype and shape."""
    dtype = DTYPES[transfer.dtype]
    part = buffer[offset : offset + num_elements(transfer.target_box) * dtype.itemsize].view(dtype)
    return part.view([stop - start for start, stop in transfer.target_box])
