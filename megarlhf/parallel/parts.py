"""A flat buffer cut into one part a rank: the parts summed over the ranks, each where it belongs, or copied to all.

Ranks of one machine without GPUs pass pieces through memory that they share; others send messages. gloo's own sum of
parts is a sum of everything: twice the bytes, through sockets.
"""

from collections.abc import Sequence
from functools import cache, reduce
from typing import Protocol

import torch
import torch.distributed as dist

from megarlhf import device
from megarlhf.parallel.meeting import Meeting
from megarlhf.parallel.shared_memory import open_boxes

BOX_BYTES = 2 * 2**20
"""Half a rank's shared memory: small enough that what was written to it is still in the processors' caches."""
MESSAGE_BYTES = 4 * 2**20
_LINE_BYTES = 64


class Post(Protocol):
    """Carries pieces between the ranks of a group. What came may be read until the next but one comes."""

    rank: int
    num_ranks: int
    num_bytes: int
    """Most bytes that a rank may hand in at once."""

    def start(self) -> None:
        """The ranks wait for each other, as long as it may take. Collective over the group."""

    def swap(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Piece r, all of one size, goes to rank r; returns what each rank has sent here. Collective over the group."""

    def share(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """The piece goes to every rank; returns what each rank has sent. Collective over the group."""


@cache
def open_post(group: dist.ProcessGroup) -> Post:
    """Through shared memory where the ranks of `group` are on one machine that has room, by messages elsewhere.

    Collective over the group the first time; models whose layouts put the same ranks together share what is opened.
    """
    corner = Meeting.num_bytes(group.size())
    boxes = open_boxes(group, 2 * BOX_BYTES + corner)
    return Messages(group) if boxes is None else Boxes(group, boxes, BOX_BYTES)


class Boxes:
    """A box of shared memory for each rank, in two halves: while one is read the next pieces go into the other."""

    def __init__(self, group: dist.ProcessGroup, boxes: Sequence[torch.Tensor], num_bytes: int):
        """`boxes` uint8, by rank, as `open_boxes` gives them: two halves of `num_bytes` each, then a Meeting's.

        Collective over the group.
        """
        self.rank, self.num_ranks, self.num_bytes = dist.get_rank(group), group.size(), num_bytes
        self._group = group
        self._written, self._read = [[box[at : at + num_bytes] for box in boxes] for at in (0, num_bytes)]
        self._meeting = Meeting(self.rank, [box[2 * num_bytes :] for box in boxes])
        dist.barrier(group)  # nobody comes to the meeting before all have made their seats

    def start(self) -> None:
        """See `Post`. A rank that is far ahead sleeps here, and hears at once when another one is gone."""
        dist.barrier(self._group)

    def swap(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Post`."""
        for rank, piece in enumerate(pieces):
            if rank != self.rank:
                self._letter(self._written[self.rank], self.rank, rank, piece).copy_(piece)
        self._turn()
        return [
            piece if sender == self.rank else self._letter(box, sender, self.rank, piece)
            for sender, (box, piece) in enumerate(zip(self._read, pieces, strict=True))
        ]

    def share(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """See `Post`."""
        self._written[self.rank][: piece.nbytes].view(piece.dtype).copy_(piece)
        self._turn()
        return [box[: piece.nbytes].view(piece.dtype) for box in self._read]

    def _letter(self, box: torch.Tensor, sender: int, receiver: int, piece: torch.Tensor) -> torch.Tensor:
        """What the sender's box holds for a receiver, in the dtype and size of `piece`."""
        start = (receiver - (receiver > sender)) * (self.num_bytes // (self.num_ranks - 1) // _LINE_BYTES * _LINE_BYTES)
        return box[start : start + piece.nbytes].view(piece.dtype)

    def _turn(self) -> None:
        """What all have written may be read. Who is here has read what came before: it may be written over."""
        self._meeting.wait()
        self._written, self._read = self._read, self._written


class Messages:
    """Messages between each two ranks, where they do not share memory."""

    def __init__(self, group: dist.ProcessGroup, num_bytes: int = MESSAGE_BYTES):
        self.rank, self.num_ranks, self.num_bytes = dist.get_rank(group), group.size(), num_bytes
        self._group = group

    def start(self) -> None:
        """See `Post`. Messages wait for each other."""

    def swap(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Post`."""
        came = [piece if rank == self.rank else torch.empty_like(piece) for rank, piece in enumerate(pieces)]
        operations = []
        for rank, piece in enumerate(pieces):
            if rank != self.rank:
                peer = dist.get_global_rank(self._group, rank)
                operations.append(dist.P2POp(dist.isend, piece, peer, self._group))
                operations.append(dist.P2POp(dist.irecv, came[rank], peer, self._group))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return came

    def share(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """See `Post`."""
        return self.swap([piece] * self.num_ranks)


@device.labelled("communicate")
@torch.no_grad()
def sum_parts(buffer: torch.Tensor, post: Post, output: torch.Tensor | None = None) -> None:
    """Rank r's part r of `buffer` [num_ranks * m] becomes the sum of all ranks' parts r; its other parts stay. The sum
    goes to `output` [m] instead, where given.

    Collective over the post's group. The terms are added in the order of the ranks, and in float32 where they are
    narrower: the same bits whatever the timing.
    """
    parts = buffer.view(post.num_ranks, -1)
    total = parts[post.rank] if output is None else output
    size = post.num_bytes // (post.num_ranks - 1) // _LINE_BYTES * _LINE_BYTES // buffer.itemsize
    for start in range(0, len(total), size):
        _sum(post.swap(list(parts[:, start : start + size])), total[start : start + size])


@device.labelled("communicate")
@torch.no_grad()
def sum_whole(buffer: torch.Tensor, post: Post) -> None:
    """`buffer` [n] becomes the sum of all ranks', with the bits of `sum_parts`. Collective over the post's group.

    For messages of a few boxes: everything goes to everybody, in as few turns as there are boxes to fill.
    """
    size = post.num_bytes // buffer.itemsize
    for start in range(0, len(buffer), size):
        piece = buffer[start : start + size]
        _sum(post.share(piece), piece)


def _sum(terms: list[torch.Tensor], output: torch.Tensor) -> None:
    first, *others, last = terms
    wide = first if first.itemsize >= torch.float32.itemsize else first.float()
    torch.add(reduce(torch.add, others, wide), last, out=output)


@device.labelled("communicate")
@torch.no_grad()
def gather_parts(buffer: torch.Tensor, post: Post) -> None:
    """Part r of `buffer` [num_ranks * m] becomes what it is on rank r. Collective over the post's group."""
    parts = buffer.view(post.num_ranks, -1)
    size = post.num_bytes // buffer.itemsize
    for start in range(0, parts.shape[1], size):
        pieces = parts[:, start : start + size]
        for rank, piece in enumerate(post.share(pieces[post.rank])):
            if rank != post.rank:
                pieces[rank].copy_(piece)


class Carried:
    """torch's collectives over one group, for `device.carry`: through its post."""

    def __init__(self, post: Post):
        self._post = post

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Collective over the group."""
        flat = tensor.detach().contiguous().view(-1)
        sum_whole(flat, self._post)
        if not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> None:
        """Collective over the group."""
        flat = output.detach().view(-1)
        flat.view(self._post.num_ranks, -1)[self._post.rank].copy_(part.detach().reshape(-1))
        gather_parts(flat, self._post)

    def reduce_scatter(self, output: torch.Tensor, whole: torch.Tensor) -> None:
        """Collective over the group."""
        sum_parts(whole.detach().reshape(-1), self._post, output.detach().view(-1))


def carry(group: dist.ProcessGroup) -> None:
    """From now on sums and gathers over `group` go through memory that its ranks share, where they do: on one machine,
    without GPUs. Collective over the group."""
    if device.is_host() and group.size() > 1:
        post = open_post(group)
        if isinstance(post, Boxes):
            device.carry(group, Carried(post))
