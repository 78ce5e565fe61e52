"""Ranks as a small array with an axis per kind of parallelism; every process group is one of its slices. Pure integers.

rank = tp + TP * (cp + CP * (dp + DP * pp)): tensor-parallel neighbours are adjacent, pipeline stages far apart.

The ranks of one stage are counted once more for its experts: neighbours in groups of ep, each holding 1/ep of them. So
ep first cuts along tp, then cp, then dp, and tensor ranks never cut an expert. (megatron-core calls this an expert
tensor-parallel size of 1.)
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from megarlhf.config.layout import Layout

_AXES = ("tp", "cp", "dp", "pp")
"""Fastest first."""
_NAMES = {
    "mp": ("tp", "pp"),
    "pos_embd": (),
    "world": _AXES,
}
"""Groups that are not simply called by their axes."""
_EXPERT_NAMES = {
    "ep": ("ep",),
    "expt_tp": (),
    "expt_dp": ("expt_dp",),
    "tp_ep": ("ep",),
    "tp_ep_pp": ("ep", "pp"),
}
"""Groups of the ranks as experts see them: by (place in a group of ep, number of that group in its stage, stage)."""


@dataclass(frozen=True)
class Coordinates:
    """Where a rank sits along each axis."""

    tp: int
    pp: int
    dp: int
    cp: int = 0
    ep: int = 0
    """Which of the ep shares of the experts it holds; it follows from tp, cp and dp."""


@dataclass(frozen=True)
class Grid:
    """All ranks of a world of `world_size` ranks under one layout. Raises LayoutError when the sizes do not divide."""

    layout: Layout
    world_size: int

    def __post_init__(self):
        self.layout.dp(self.world_size)

    def size(self, axis: str) -> int:
        """Ranks along one of the axes tp, cp, dp, pp."""
        sizes = {"tp": self.layout.tp, "cp": self.layout.cp, "pp": self.layout.pp}
        return self.layout.dp(self.world_size) if axis == "dp" else sizes[axis]

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` sits. Raises ValueError outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size} ranks")
        place = {}
        for axis in _AXES:
            rank, place[axis] = divmod(rank, self.size(axis))
        return self._with_expert_share(Coordinates(**place))

    def rank(self, coordinates: Coordinates) -> int:
        """The rank at `coordinates` (the inverse of `coordinates`)."""
        place = {axis: index for axis, index in zip(_AXES, self._indexes(coordinates), strict=True)}
        rank = 0
        for axis in reversed(_AXES):
            rank = rank * self.size(axis) + place[axis]
        return rank

    def groups(self, axis: str) -> list[list[int]]:
        """All groups of one kind, each in ascending rank order; every rank is in exactly one of them.

        `axis`: tp, cp, dp, pp; several joined, such as tp_cp or tp_dp_cp; mp (tp and pp); as the experts of a mixture
        see the ranks, ep, expt_tp, expt_dp, tp_ep, tp_ep_pp; world; embd: the ranks that hold copies of tied embeddings
        (first and last stage), others alone; pos_embd: each rank alone.
        """
        if axis == "embd":
            return self._embedding_groups()
        if axis in _EXPERT_NAMES:
            return self._expert_groups(_EXPERT_NAMES[axis])
        varying = _NAMES[axis] if axis in _NAMES else tuple(axis.split("_"))
        unknown = set(varying) - set(_AXES)
        if unknown:
            raise ValueError(f"no axis {sorted(unknown)}; a group is {_AXES}, several joined by _, or {sorted(_NAMES)}")
        places = [dict(zip(_AXES, self._indexes(at), strict=True)) for at in self.all_coordinates()]
        return _groups(places, varying)

    def group_of(self, axis: str, rank: int) -> list[int]:
        """The group of that kind that holds `rank`."""
        return next(group for group in self.groups(axis) if rank in group)

    def all_coordinates(self) -> list[Coordinates]:
        """The coordinates of ranks 0, 1, 2, ..."""
        sizes = [range(self.size(axis)) for axis in reversed(_AXES)]
        places = [Coordinates(tp=tp, pp=pp, dp=dp, cp=cp) for pp, dp, cp, tp in product(*sizes)]
        return [self._with_expert_share(place) for place in places]

    def _in_stage(self, at: Coordinates) -> int:
        """Number of a rank among those of its stage."""
        return at.tp + self.layout.tp * (at.cp + self.layout.cp * at.dp)

    def _with_expert_share(self, at: Coordinates) -> Coordinates:
        return replace(at, ep=self._in_stage(at) % self.layout.ep)

    def _expert_groups(self, varying: tuple[str, ...]) -> list[list[int]]:
        places = [
            {"ep": at.ep, "expt_dp": self._in_stage(at) // self.layout.ep, "pp": at.pp} for at in self.all_coordinates()
        ]
        return _groups(places, varying)

    def _embedding_groups(self) -> list[list[int]]:
        groups = []
        for stages in self.groups("pp"):
            ends = sorted({stages[0], stages[-1]})
            groups.append(ends)
            groups += [[rank] for rank in stages if rank not in ends]
        return groups

    @staticmethod
    def _indexes(coordinates: Coordinates) -> tuple[int, int, int, int]:
        """Indexes in the order of `_AXES`."""
        return coordinates.tp, coordinates.cp, coordinates.dp, coordinates.pp


def _groups(places: list[dict[str, int]], varying: tuple[str, ...]) -> list[list[int]]:
    """Ranks (indexes of `places`) that differ in nothing but the varying indexes, ascending."""
    by_place: dict[tuple[int, ...], list[int]] = {}
    for rank, indexes in enumerate(places):
        fixed = tuple(index for name, index in indexes.items() if name not in varying)
        by_place.setdefault(fixed, []).append(rank)
    return list(by_place.values())


def shards(layouts: Iterable[Layout], world_size: int, most: int) -> list[list[int]]:
    """Ranks by shard of a batch, each ascending: a shard is made of whole copies of a model under every layout, so that
    its rows can be sampled, scored and learned from without the others.

    All have as many ranks; there are `most` of them, or the largest divisor of it that these layouts allow.
    """
    pieces = _whole_copies(layouts, world_size)
    count = gcd(most, len(pieces)) if len({len(piece) for piece in pieces}) == 1 else 1
    each = len(pieces) // count
    return [sorted(rank for piece in pieces[at * each :][:each] for rank in piece) for at in range(count)]


def _whole_copies(layouts: Iterable[Layout], world_size: int) -> list[list[int]]:
    """The smallest sets of ranks that cut no copy of a model, and no group that shares out experts, by first rank."""
    leader = list(range(world_size))

    def lead(rank: int) -> int:
        while leader[rank] != rank:
            leader[rank] = rank = leader[leader[rank]]
        return rank

    for layout in set(layouts):
        grid = Grid(layout, world_size)
        for group in (group for axis in ("tp_cp", "pp", "ep") for group in grid.groups(axis)):
            for rank in group[1:]:
                first, second = sorted((lead(group[0]), lead(rank)))
                leader[second] = first
    pieces: dict[int, list[int]] = {}
    for rank in range(world_size):
        pieces.setdefault(lead(rank), []).append(rank)
    return list(pieces.values())
