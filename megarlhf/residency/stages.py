"""Who is in memory when: tenants, where each of them waits, and what a stage has to move. Pure; no torch.

A stage says which tenants it works with. Entering it sends out those that are not among them and have another home
than the device, then brings in those that are; whoever is at home on the device stays. Nothing moves when a stage ends,
so that two stages in a row that share a tenant move it once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Part = Literal["weights", "gradients", "optimizer", "cache", "packed"]
WEIGHTS: Part = "weights"
GRADIENTS: Part = "gradients"
OPTIMIZER: Part = "optimizer"
CACHE: Part = "cache"
"""Keys and values of the sequences that are being sampled."""
PACKED: Part = "packed"
"""The generator's weights in the order that a CPU multiplies fastest with, while it samples."""

Place = Literal["device", "host", "disk", "gone"]
"""Where a tenant's bytes are; `gone`: nowhere, because what they said is not needed again. They come back as zeros."""
PLACES: tuple[Place, ...] = ("device", "host", "disk")
"""Those that hold bytes."""

_OUT_FIRST: tuple[Part, ...] = (OPTIMIZER, GRADIENTS, PACKED, CACHE, WEIGHTS)
_IN_FIRST: tuple[Part, ...] = (WEIGHTS, GRADIENTS, OPTIMIZER, PACKED, CACHE)


@dataclass(frozen=True, order=True)
class Tenant:
    """One part of one model of a run: what moves as a whole."""

    model: str
    part: Part

    def __str__(self) -> str:
        return f"{self.model}.{self.part}"


@dataclass(frozen=True)
class Stage:
    """A piece of a step, and the tenants that are on the device while it runs."""

    name: str
    tenants: tuple[Tenant, ...]

    def changes(self, tenant: Tenant) -> bool:
        """Whether the tenant may say something else afterwards; weights do only where their optimizer is in as well."""
        has_optimizer = Tenant(tenant.model, OPTIMIZER) in self.tenants
        return tenant in self.tenants and (tenant.part != WEIGHTS or has_optimizer)


@dataclass(frozen=True)
class Move:
    """A tenant goes from one place to another."""

    tenant: Tenant
    source: Place
    target: Place


def moves(stage: Stage, places: Mapping[Tenant, Place], homes: Mapping[Tenant, Place]) -> list[Move]:
    """What entering `stage` moves, in order: everything that goes out before anything comes in.

    Out go optimizer and gradients first, weights last; in come weights first, the cache last. A stage that works with
    no tenant leaves all where they are. `places` says where each tenant is now, `homes` where it waits.
    """
    if not stage.tenants:
        return []
    leaving = [
        Move(tenant, "device", homes[tenant])
        for tenant, place in places.items()
        if place == "device" and tenant not in stage.tenants and homes[tenant] != "device"
    ]
    coming = [Move(tenant, places[tenant], "device") for tenant in stage.tenants if places[tenant] != "device"]
    leaving.sort(key=lambda move: _OUT_FIRST.index(move.tenant.part))
    coming.sort(key=lambda move: _IN_FIRST.index(move.tenant.part))
    return leaving + coming


def after(places: Mapping[Tenant, Place], moved: Iterable[Move]) -> dict[Tenant, Place]:
    """Where tenants are once they moved."""
    return dict(places) | {move.tenant: move.target for move in moved}


@dataclass(frozen=True)
class Occupancy:
    """Who is where while a stage runs."""

    stage: Stage
    places: Mapping[Tenant, Place]
    moved: tuple[Move, ...]
    """On the way in."""

    def bytes_at(self, place: Place, sizes: Mapping[Tenant, int]) -> int:
        """Bytes of the tenants there, of the sizes given."""
        return sum(sizes[tenant] for tenant, where in self.places.items() if where == place)

    def bytes_moved(self, sizes: Mapping[Tenant, int]) -> int:
        """Bytes copied on the way in, both directions; what is gone or comes back as zeros is not copied."""
        return sum(sizes[move.tenant] for move in self.moved if "gone" not in (move.source, move.target))


def timeline(stages: Sequence[Stage], homes: Mapping[Tenant, Place]) -> list[Occupancy]:
    """Occupancy of each stage of a step, in order, when everybody is at home before the first one."""
    found: list[Occupancy] = []
    places: Mapping[Tenant, Place] = homes
    for stage in stages:
        moved = moves(stage, places, homes)
        places = after(places, moved)
        found.append(Occupancy(stage, places, tuple(moved)))
    return found


def over_budget(
    stage: Stage, since: Mapping[Tenant, str], sizes: Mapping[Tenant, int], budget_bytes: int
) -> str | None:
    """A sentence when the tenants on the device need more than `budget_bytes`, else None.

    `since` names, for each tenant on the device, the stage that it has been there since.
    """
    total = sum(sizes[tenant] for tenant in since)
    if not budget_bytes or total <= budget_bytes:
        return None
    held = {tenant: name for tenant, name in since.items() if sizes[tenant]}
    in_the_way = [tenant for tenant, name in held.items() if tenant not in stage.tenants and name != stage.name]
    own = [f"{tenant} {gib(sizes[tenant])}" for tenant in held if tenant not in in_the_way]
    others = [f"{tenant} {gib(sizes[tenant])} (there since stage {held[tenant]})" for tenant in in_the_way]
    beside = f" beside {', '.join(others)}" if others else ""
    movable = in_the_way[0] if in_the_way else None
    advice = f"let {movable} wait elsewhere (residency.{_setting(movable)}: host or disk), or " if movable else ""
    return (
        f"stage {stage.name}: {', '.join(own)}{beside} are {gib(total)} on the device, more than residency.device_gib "
        f"{budget_bytes / 2**30:.4g}; {advice}raise residency.device_gib or use more ranks"
    )


def _setting(tenant: Tenant) -> str:
    return str(tenant) if tenant.model in ("actor", "critic") else tenant.model


def gib(num_bytes: float) -> str:
    """In GiB, or in MiB below a tenth of one."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.1f} MiB"
