"""Ranks as a small array with an axis per kind of parallelism; every process group is one of its slices. Pure integers.

rank = tp + TP * (cp + CP * (dp + DP * pp)): tensor-parallel neighbours are adjacent, pipeline stages far apart.
"""

from dataclasses import dataclass
from itertools import product

from megarlhf.config.layout import Layout

_AXES = ("tp", "cp", "dp", "pp")
"""Fastest first."""
_NAMES = {
    "mp": ("tp", "pp"),
    "ep": (),
    "expt_tp": ("tp",),
    "expt_dp": ("cp", "dp"),
    "tp_ep": ("tp",),
    "tp_ep_pp": ("tp", "pp"),
    "pos_embd": (),
    "world": _AXES,
}
"""Groups that are not simply called by their axes. ep is 1: the expert groups are those of the dense layers."""


@dataclass(frozen=True)
class Coordinates:
    """Where a rank sits along each axis."""

    tp: int
    pp: int
    dp: int
    cp: int = 0
    ep: int = 0


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
        return Coordinates(**place)

    def rank(self, coordinates: Coordinates) -> int:
        """The rank at `coordinates` (the inverse of `coordinates`)."""
        place = {axis: index for axis, index in zip(_AXES, self._indexes(coordinates), strict=True)}
        rank = 0
        for axis in reversed(_AXES):
            rank = rank * self.size(axis) + place[axis]
        return rank

    def groups(self, axis: str) -> list[list[int]]:
        """All groups of one kind, each in ascending rank order; every rank is in exactly one of them.

        `axis`: tp, cp, dp, pp, ep; several joined, such as tp_cp or tp_dp_cp; mp (tp and pp); expt_tp, expt_dp, tp_ep,
        tp_ep_pp; world; embd: the ranks that hold copies of tied embeddings (first and last stage), others alone;
        pos_embd: each rank alone.
        """
        if axis == "embd":
            return self._embedding_groups()
        varying = _NAMES[axis] if axis in _NAMES else tuple(axis.split("_"))
        unknown = set(varying) - set(_AXES)
        if unknown:
            raise ValueError(f"no axis {sorted(unknown)}; a group is {_AXES}, several joined by _, or {sorted(_NAMES)}")
        by_place: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            indexes = dict(zip(_AXES, self._indexes(self.coordinates(rank)), strict=True))
            fixed = tuple(index for name, index in indexes.items() if name not in varying)
            by_place.setdefault(fixed, []).append(rank)
        return list(by_place.values())

    def group_of(self, axis: str, rank: int) -> list[int]:
        """The group of that kind that holds `rank`."""
        return next(group for group in self.groups(axis) if rank in group)

    def all_coordinates(self) -> list[Coordinates]:
        """The coordinates of ranks 0, 1, 2, ..."""
        sizes = [range(self.size(axis)) for axis in reversed(_AXES)]
        return [Coordinates(tp=tp, pp=pp, dp=dp, cp=cp) for pp, dp, cp, tp in product(*sizes)]

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
