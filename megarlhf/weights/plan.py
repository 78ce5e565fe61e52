"""Who sends which box to whom when a model moves from one layout to another: a pure plan, the same on every rank.

Every target element is written exactly once. What a rank holds already it copies; otherwise one of the ranks that hold
the piece sends it, the one with the fewest bytes to send so far, so that data-parallel replicas share the work.
Messages are grouped into buckets: in one bucket no rank sends and receives more than `bucket_bytes` together, which is
what it holds beside its two models.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from megarlhf.config.layout import Layout
from megarlhf.config.settings import Precision
from megarlhf.models.architecture import Architecture
from megarlhf.models.head_styles import is_value_head
from megarlhf.models.names import Head
from megarlhf.parallel.grid import Grid
from megarlhf.weights.boxes import Box, Piece, intersect, joined_rows, move, num_elements, shape_of, split, whole
from megarlhf.weights.local_map import Key, local_map
from megarlhf.weights.transfers import ITEM_BYTES, Holding, Message, ReshardPlan, Transfer, aligned

BUCKET_BYTES = 64 * 2**20


def reshard_plan(
    architecture: Architecture,
    head: Head,
    source: Layout,
    target: Layout,
    world_size: int,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: Precision = "float32",
) -> ReshardPlan:
    """Plan for moving a model over `world_size` ranks from one layout to another. `dtype` is the precision on the wire.

    The value head is always sent in float32. Raises LayoutError when a layout does not divide the world.
    """
    held = holdings(architecture, source, world_size, head)
    wanted = holdings(architecture, target, world_size, head)
    return plan_transfers(held, wanted, lambda hf_name: "float32" if is_value_head(hf_name) else dtype, bucket_bytes)


def holdings(architecture: Architecture, layout: Layout, world_size: int, head: Head) -> tuple[Holding, ...]:
    """What every rank of the world holds; replicas share one object."""
    grid = Grid(layout, world_size)
    coordinates = [grid.coordinates(rank) for rank in range(world_size)]
    made = {(at.tp, at.pp, at.ep): at for at in coordinates}
    maps = {place: local_map(architecture, layout, at, head) for place, at in made.items()}
    return tuple(maps[at.tp, at.pp, at.ep] for at in coordinates)


def plan_transfers(
    source: Sequence[Holding], target: Sequence[Holding], dtype_of: Callable[[str], Precision], bucket_bytes: int
) -> ReshardPlan:
    """Plan between any two ways to hold the same tensors. `dtype_of(hf_name)` is the precision on the wire."""
    holders = _holders(source)
    overlaps = {id(holding): _overlaps(holding, holders) for holding in target}
    sent = [0] * len(source)
    copies: list[Transfer] = []
    remote: list[list[Transfer]] = []
    for rank, holding in enumerate(target):
        found = _joined(_chosen(rank, overlaps[id(holding)], dtype_of, sent))
        copies += [transfer for transfer in found if transfer.source_rank == rank]
        arriving = [transfer for transfer in found if transfer.source_rank != rank]
        arriving.sort(key=lambda transfer: (transfer.source_rank - rank) % len(source))  # noqa: B023
        remote.append([part for transfer in arriving for part in _parts(transfer, bucket_bytes)])
    return ReshardPlan(tuple(source), tuple(target), tuple(copies), _buckets(remote, bucket_bytes), bucket_bytes)


def owned_pieces(held: Sequence[Holding]) -> list[list[tuple[Key, Piece]]]:
    """For each rank the pieces that are its to speak for: every element of every tensor belongs to exactly one rank."""
    owned: list[list[tuple[Key, Piece]]] = [[] for _ in held]
    for hf_name, boxes in _holders(held).items():
        for box, owners in boxes.items():
            owned[owners[0].ranks[0]].append((owners[0].key, Piece(hf_name, box, owners[0].box)))
    return owned


@dataclass(frozen=True)
class _Holder:
    """Ranks that hold one box of a Hugging Face tensor at the same place of the same local tensor."""

    ranks: tuple[int, ...]
    key: Key
    box: Box
    """In the local tensor."""


def _holders(source: Sequence[Holding]) -> dict[str, dict[Box, list[_Holder]]]:
    """hf_name -> box of it -> who holds it. Boxes of one tensor are disjoint, since all of a model has one tp."""
    ranks_of = defaultdict(list)
    for rank, holding in enumerate(source):
        ranks_of[id(holding)].append(rank)
    found: dict[str, dict[Box, list[_Holder]]] = defaultdict(lambda: defaultdict(list))
    for ranks in ranks_of.values():
        for key, tensor in source[ranks[0]].items():
            for piece in tensor.pieces:
                found[piece.hf_name][piece.source].append(_Holder(tuple(ranks), key, piece.target))
    return found


@dataclass(frozen=True)
class _Overlap:
    """A part of a target tensor that one or several holders can give."""

    hf_name: str
    key: Key
    box: Box
    """In the target's local tensor."""
    givers: tuple[tuple[_Holder, Box], ...]
    """(holder, the part in the holder's local tensor)."""


def _overlaps(target: Holding, holders: dict[str, dict[Box, list[_Holder]]]) -> list[_Overlap]:
    found = []
    for key, tensor in target.items():
        for piece in tensor.pieces:
            for held, owners in holders[piece.hf_name].items():
                common = intersect(piece.source, held)
                if common is not None:
                    givers = tuple((owner, move(common, held, owner.box)) for owner in owners)
                    found.append(_Overlap(piece.hf_name, key, move(common, piece.source, piece.target), givers))
    return found


def _chosen(rank: int, overlaps: list[_Overlap], dtype_of: Callable[[str], Precision], sent: list[int]):
    """One sender for every overlap: the rank itself if it can, else the holder with the fewest bytes to send so far.

    What one set of holders gives to one tensor comes from one of them, so that neighbouring rows travel as one box.
    `sent` (bytes per rank) is updated.
    """
    found, decided = [], {}
    for overlap in overlaps:
        set_of_holders = (overlap.key, tuple((holder.ranks[0], holder.key) for holder, _ in overlap.givers))
        if set_of_holders not in decided:
            decided[set_of_holders] = _sender(rank, overlap, sent)
        sender, place = decided[set_of_holders]
        holder, box = overlap.givers[place]
        transfer = Transfer(sender, rank, holder.key, box, overlap.key, overlap.box, dtype_of(overlap.hf_name))
        sent[sender] += transfer.num_bytes if sender != rank else 0
        found.append(transfer)
    return found


def _sender(rank: int, overlap: _Overlap, sent: list[int]) -> tuple[int, int]:
    """(sending rank, its place among the givers)."""
    able = [(holding, place) for place, (holder, _) in enumerate(overlap.givers) for holding in holder.ranks]
    own = [(holding, place) for holding, place in able if holding == rank]
    return own[0] if own else min(able, key=lambda choice: (sent[choice[0]], choice))


def _joined(transfers: list[Transfer]) -> list[Transfer]:
    """Transfers of neighbouring rows, on both sides, made one: q, k and v of a group are cut apart only in names."""
    found: list[Transfer] = []
    for transfer in sorted(transfers, key=lambda one: (one.target, one.target_box)):
        merged = _merged(found[-1], transfer) if found else None
        if merged is None:
            found.append(transfer)
        else:
            found[-1] = merged
    return found


def _merged(one: Transfer, other: Transfer) -> Transfer | None:
    if (one.source_rank, one.source, one.target) != (other.source_rank, other.source, other.target):
        return None
    source_box = joined_rows(one.source_box, other.source_box)
    target_box = joined_rows(one.target_box, other.target_box)
    if source_box is None or target_box is None:
        return None
    return replace(one, source_box=source_box, target_box=target_box)


def _parts(transfer: Transfer, bucket_bytes: int) -> list[Transfer]:
    """The transfer cut into parts of at most a quarter bucket, so that little of a bucket stays empty."""
    boxes = split(transfer.target_box, max(1, bucket_bytes // 4 // ITEM_BYTES[transfer.dtype]))
    moved = [move(box, transfer.target_box, transfer.source_box) for box in boxes]
    return [replace(transfer, source_box=there, target_box=here) for there, here in zip(moved, boxes, strict=True)]


def _buckets(remote: list[list[Transfer]], bucket_bytes: int) -> tuple[tuple[Message, ...], ...]:
    """Each transfer in the first bucket that has room at both of its ends.

    Receivers take turns, each beginning with another sender, so that all ends are busy from the first bucket on.
    """
    ends: dict[int, _End] = defaultdict(_End)
    buckets: dict[int, dict[tuple[int, int], list[Transfer]]] = defaultdict(lambda: defaultdict(list))
    for turn in zip_longest(*remote):
        for transfer in turn:
            if transfer is not None:
                sender, receiver = ends[transfer.source_rank], ends[transfer.target_rank]
                index = _place(sender, receiver, aligned(transfer.num_bytes), bucket_bytes)
                buckets[index][transfer.source_rank, transfer.target_rank].append(transfer)
    return tuple(_messages(buckets[index]) for index in sorted(buckets))


@dataclass
class _End:
    """How full the buckets are at one rank while a plan is made, with what it sends and what it receives."""

    used: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    first_open: int = 0
    """Buckets before this one are nearly full: not worth asking."""


def _place(sender: _End, receiver: _End, size: int, bucket_bytes: int) -> int:
    """Index of the bucket for `size` bytes between two ends, which are updated."""
    index, limit = max(sender.first_open, receiver.first_open), max(bucket_bytes, size) - size
    while sender.used[index] > limit or receiver.used[index] > limit:
        index += 1
    for end in (sender, receiver):
        end.used[index] += size
        while end.used[end.first_open] > bucket_bytes * 15 // 16:
            end.first_open += 1
    return index


def _messages(pairs: dict[tuple[int, int], list[Transfer]]) -> tuple[Message, ...]:
    return tuple(Message(source, target, tuple(pairs[source, target])) for source, target in sorted(pairs))


def validate(plan: ReshardPlan) -> None:
    """Check that every target element is written exactly once, from a place that its source rank holds.

    Also that no rank's part in a bucket exceeds its size, except for a single element. Raises AssertionError with the
    tensor.
    """
    written: dict[tuple[int, Key], list[Box]] = defaultdict(list)
    arriving = [transfer for message in plan.messages for transfer in message.transfers]
    for transfer in [*plan.copies, *arriving]:
        held = whole(plan.source[transfer.source_rank][transfer.source].shape)
        assert intersect(held, transfer.source_box) == transfer.source_box, f"{transfer}: outside of the source tensor"
        assert shape_of(transfer.source_box) == shape_of(transfer.target_box), f"{transfer}: shapes differ"
        written[transfer.target_rank, transfer.target].append(transfer.target_box)
    for rank, holding in enumerate(plan.target):
        for key, tensor in holding.items():
            _require_filled(f"rank {rank}, {key}", [piece.target for piece in tensor.pieces], written[rank, key])
    for index, bucket in enumerate(plan.buckets):
        _require_bounded(f"bucket {index}", bucket, plan.bucket_bytes)


def _require_filled(where: str, wanted: list[Box], written: list[Box]) -> None:
    """`written` covers exactly `wanted`, once (both may be cut differently; boxes of `wanted` are disjoint)."""
    rows = sorted(written)
    for place, box in enumerate(rows):
        for other in rows[place + 1 :]:
            if other[0][0] >= box[0][1]:
                break
            assert intersect(box, other) is None, f"{where}: {box} and {other} are both written"
    inside = sum(num_elements(common) for box in rows for part in wanted if (common := intersect(box, part)))
    total = sum(map(num_elements, rows))
    assert inside == total, f"{where}: {total - inside} padding elements are written"
    missing = sum(map(num_elements, wanted)) - total
    assert missing == 0, f"{where}: {missing} elements are never written"


def _require_bounded(where: str, bucket: tuple[Message, ...], bucket_bytes: int) -> None:
    used: dict[int, int] = defaultdict(int)
    for message in bucket:
        for rank in (message.source_rank, message.target_rank):
            used[rank] += message.buffer_bytes
    worst = max(used.values())
    assert worst <= max(bucket_bytes, 8), f"{where}: {worst} bytes at one rank, more than {bucket_bytes}"
