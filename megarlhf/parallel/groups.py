"""The process groups of one model: a value made from its layout, so that each model of a run can have its own layout.

megatron-core's global parallel_state stays uninitialised: every model, optimizer and schedule is given the
`collection` here. The two process-wide things that megatron-core cannot do without are set up here too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megarlhf.config.layout import Layout
from megarlhf.parallel.grid import Coordinates, Grid
from megarlhf.parallel.parts import carry
from megarlhf.parallel.shards import RankedShard
from megarlhf.records.seeds import derive_seed

_COLLECTION_AXES = (
    "tp", "pp", "cp", "ep", "dp", "mp", "tp_cp", "dp_cp", "tp_dp_cp", "embd", "pos_embd",
    "expt_tp", "expt_dp", "tp_ep", "tp_ep_pp",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Groups:
    """This rank's process groups under one layout, and where it sits in them."""

    layout: Layout
    grid: Grid
    rank: int
    coordinates: Coordinates
    collection: ProcessGroupCollection
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    mp: dist.ProcessGroup
    world: dist.ProcessGroup
    shard: RankedShard
    """Of a step's batch; the whole batch where it is kept in one piece."""
    rows: dist.ProcessGroup
    """The data-parallel ranks that share out the rows of the shard."""

    @property
    def is_first_stage(self) -> bool:
        """This rank holds the embedding."""
        return self.coordinates.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """This rank holds the final norm and the head."""
        return self.coordinates.pp == self.layout.pp - 1

    @property
    def world_size(self) -> int:
        return self.grid.world_size

    def ranks(self, axis: str) -> list[int]:
        """Global ranks of this rank's group of one kind (see `Grid.groups`), ascending."""
        return self.grid.group_of(axis, self.rank)


def build_groups(layout: Layout, world_size: int, shards: Sequence[Sequence[int]] = ()) -> Groups:
    """Make all process groups of a layout (collective over the world: every rank makes every group, in one order).

    `shards`: ranks by shard of a batch (see `grid.shards`), which cut no copy of the model; none: all hold all of it.
    Raises LayoutError when the layout does not fit the world, or asks for what is not built.
    """
    if world_size != dist.get_world_size():
        raise ValueError(f"groups for {world_size} ranks asked for in a world of {dist.get_world_size()}")
    grid, rank = Grid(layout, world_size), dist.get_rank()
    mine = {axis: _make(grid.groups(axis), rank) for axis in _COLLECTION_AXES}
    collection = ProcessGroupCollection(**mine)
    collection.intra_dp_cp = collection.dp_cp
    collection.intra_expt_dp = collection.expt_dp
    # The norm of all gradients is reduced over this one: it has to span every shard of the model.
    collection.intra_dist_opt = dist.group.WORLD
    groups = Groups(
        layout=layout,
        grid=grid,
        rank=rank,
        coordinates=grid.coordinates(rank),
        collection=collection,
        tp=mine["tp"],
        pp=mine["pp"],
        cp=mine["cp"],
        dp=mine["dp"],
        mp=mine["mp"],
        world=dist.group.WORLD,
        shard=_shard_of(shards, rank),
        rows=_make(_within(grid.groups("dp"), shards), rank),
    )
    carry(groups.tp)
    _share_global_buffer()
    seed_random_tracker(groups, seed=0)
    return groups


def seed_random_tracker(groups: Groups, seed: int) -> None:
    """Seed megatron-core's process-wide random tracker (weights and dropout of tensor-parallel layers) for this rank.

    torch's own CPU generator is left as it was: megatron-core would reseed it where the CPU stands in for the GPU.
    """
    state = torch.get_rng_state()
    tp_rank = groups.coordinates.tp
    model_parallel_cuda_manual_seed(seed, tp_rank=tp_rank, ep_rank=0, etp_rank=tp_rank)
    torch.set_rng_state(state)


def seed_dropout(groups: Groups, seed: int) -> None:
    """Seed what dropout draws from: torch's generator alike on the tensor ranks of a copy, where residuals are whole,
    and otherwise per rank; the tracker per tensor rank as well."""
    place = groups.coordinates
    seed_random_tracker(groups, derive_seed(seed, "tracker", place.dp, place.pp, place.cp) % 2**31)
    torch.manual_seed(derive_seed(seed, "residuals", place.dp, place.pp, place.cp))


def _make(groups: list[list[int]], rank: int) -> dist.ProcessGroup:
    """Make those of `groups` that are not made yet (collective); returns the one that holds `rank`."""
    made = {tuple(ranks): _process_group(dist.group.WORLD, tuple(ranks)) for ranks in groups}
    return next(group for ranks, group in made.items() if rank in ranks)


def _shard_of(shards: Sequence[Sequence[int]], rank: int) -> RankedShard:
    """Collective over the world."""
    if len(shards) < 2:
        return RankedShard()
    number = next(number for number, ranks in enumerate(shards) if rank in ranks)
    peers = [list(ranks) for ranks in zip(*shards, strict=True)]
    return RankedShard(number, len(shards), _make([list(ranks) for ranks in shards], rank), _make(peers, rank))


def _within(groups: list[list[int]], shards: Sequence[Sequence[int]]) -> list[list[int]]:
    """The parts of each group that lie in one shard."""
    parts = [[rank for rank in group if rank in ranks] for group in groups for ranks in map(set, shards)]
    return [part for part in parts if part] or groups


@cache
def _process_group(world: dist.ProcessGroup, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The group of these ranks (collective over `world`, the first time).

    Models of one world whose layouts put the same ranks together share the group: each costs threads or a communicator
    with its buffers. All ranks build the same layouts in the same order, so that they find the same groups made.
    """
    return world if len(ranks) == world.size() else dist.new_group(list(ranks))


def _share_global_buffer() -> None:
    """Sequence-parallel layers take scratch memory from a process-wide buffer that only parallel_state can set up."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
