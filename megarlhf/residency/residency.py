"""The one owner of what is where: stages are entered here, tenants are moved here, and all of it is written down."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from megarlhf import device
from megarlhf.errors import ResidencyError
from megarlhf.parallel.rows import gather_objects
from megarlhf.residency.accounting import Record, merged
from megarlhf.residency.blocks import Blocks, Tensors
from megarlhf.residency.snapshot import Snapshot
from megarlhf.residency.stages import WEIGHTS, Move, Place, Stage, Tenant, after, moves, over_budget


class Exchanged(Protocol):
    """A second set of weights that is swapped into a module for the time of a call, and stays at one place."""

    @property
    def num_bytes(self) -> int:
        """Bytes held there."""
        ...

    @property
    def bytes_exchanged(self) -> int:
        """Bytes copied so far, into the module and out of it."""
        ...

    def close(self) -> None:
        """Removes what is on disk."""
        ...


class Residency:
    """Moves tenants between device, host and disk, as the stages of a run need them.

    A tenant begins on the device, where it was built. `homes` says where each one waits; one that is not named waits on
    the device.
    """

    def __init__(
        self,
        homes: Mapping[Tenant, Place],
        folder: Path,
        *,
        budget_bytes: int = 0,
        is_checked: bool = False,
    ):
        """`folder`: for what waits on disk, this rank's alone. `budget_bytes`: most that tenants may take on this
        rank's device, 0 for no limit. `is_checked`: compare checksums of what comes back."""
        self._homes = dict(homes)
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._is_checked = is_checked
        self._blocks: dict[Tenant, Blocks] = {}
        self._exchanged: dict[Tenant, Exchanged] = {}
        self._passing: dict[Tenant, int] = {}
        self._places: dict[Tenant, Place] = {}
        self._last: dict[Tenant, str] = {}
        self._current: Stage | None = None
        self._previous = "building"
        self._records: list[Record] = []
        self._before_bytes = device.memory_allocated_bytes()
        if "disk" in homes.values():
            device.return_freed_memory()

    def add(self, tenant: Tenant, tensors: Tensors, on_leave: Callable[[], None] | None = None) -> None:
        """A tenant that is on the device now. `tensors()` are what it is made of whenever it leaves; `on_leave` lets go
        of what was derived from them."""
        assert tenant not in self._places, f"{tenant} is here already"
        path = self._folder / f"{tenant}.bin"
        self._blocks[tenant] = Blocks(str(tenant), tensors, path, on_leave=on_leave, is_checked=self._is_checked)
        self._places[tenant] = "device"
        self._homes.setdefault(tenant, "device")
        self._last[tenant] = "building"

    def snapshot(self, tenant: Tenant, parameters: Mapping[Any, torch.nn.Parameter]) -> Snapshot:
        """A copy of `parameters` as they are now at the tenant's home, to be exchanged into them."""
        home = self._homes.setdefault(tenant, "host")
        file = self._folder / f"{tenant}.bin" if home == "disk" else None
        return Snapshot(parameters, on_device=home == "device", file=file, is_checked=self._is_checked)

    def add_exchanged(self, tenant: Tenant, weights: Exchanged) -> None:
        """A second set of weights, at its home for good."""
        self._exchanged[tenant] = weights
        self._homes.setdefault(tenant, "host")

    def add_passing(self, *tenants: Tenant) -> None:
        """Tenants that an engine makes and drops within a stage; it says how large they were by `note`."""
        self._passing |= dict.fromkeys(tenants, 0)

    def guard(self, model: str, modules: Iterable[torch.nn.Module]) -> None:
        """A forward pass of the modules without the model's weights is an error that names both stages."""
        for module in modules:
            module.register_forward_pre_hook(lambda *_: self.require(Tenant(model, WEIGHTS)))

    def is_here(self, tenant: Tenant) -> bool:
        """Whether the tenant is on the device now."""
        return self._places[tenant] == "device"

    def require(self, *tenants: Tenant) -> None:
        """Raises ResidencyError unless the tenants are on the device. Their storages are empty elsewhere: reading them
        would end the process."""
        for tenant in tenants:
            if self._places[tenant] != "device":
                user = f"stage {self._current.name}" if self._current else f"work after stage {self._previous}"
                raise ResidencyError(
                    f"{user} uses {tenant}, which is not on the device ({_where(self._places[tenant])}): it was last "
                    f"there for stage {self._last[tenant]}. Enter a stage that names it: with run.resident(...)"
                )

    def rest(self) -> None:
        """Everybody goes home: between the building of one model and the next."""
        assert self._current is None, "a stage is running"
        for tenant, place in self._places.items():
            if place == "device" and self._homes[tenant] != "device":
                self._carry_out([Move(tenant, "device", self._homes[tenant])])
        device.empty_cache()

    @contextmanager
    def stage(self, name: str, tenants: Sequence[Tenant]) -> Iterator[None]:
        """Inside the block `tenants` are on the device; the others have gone home. Nothing moves at its end.

        Raises ResidencyError when another stage is running, when the run has no such tenant, or when the tenants on the
        device together exceed the budget.
        """
        stage = self._entered(name, tenants)
        exchanged = {tenant: weights.bytes_exchanged for tenant, weights in self._exchanged.items()}
        planned = moves(stage, self._places, self._homes)
        try:
            self._require_room(stage, after(self._places, planned))
            with device.PeakMeter() as meter:
                start = time.perf_counter()
                bytes_in, bytes_out = self._carry_out(planned)
                seconds = time.perf_counter() - start
                yield
            self._require_room(stage, self._places)  # an optimizer's state begins with its first update
        finally:
            self._current, self._previous = None, name
        swapped = sum(weights.bytes_exchanged - exchanged[tenant] for tenant, weights in self._exchanged.items())
        peak = max(0, meter.peak_bytes - self._before_bytes)
        self._records.append(
            Record(name, self._resident(), peak, peak, bytes_in + swapped // 2, bytes_out + swapped // 2, seconds)
        )
        self._passing = dict.fromkeys(self._passing, 0)

    def note(self, tenant: Tenant, num_bytes: int) -> None:
        """The size of a passing tenant in the stage that is running."""
        self._passing[tenant] = max(self._passing[tenant], num_bytes)

    def take(self) -> list[Record]:
        """This rank's records since the last call, one per stage."""
        taken, self._records = merged(self._records), []
        return taken

    def close(self) -> None:
        """Removes the files. What waits on disk is lost."""
        for blocks in self._blocks.values():
            blocks.close()
        for weights in self._exchanged.values():
            weights.close()

    def _entered(self, name: str, tenants: Sequence[Tenant]) -> Stage:
        if self._current is not None:
            raise ResidencyError(
                f"stage {name} is entered inside stage {self._current.name}: what is on the device belongs to one "
                "stage at a time. Leave the first block before entering the second"
            )
        unknown = [tenant for tenant in tenants if tenant not in self._places and tenant not in self._passing]
        if unknown:
            raise ResidencyError(
                f"stage {name} (after stage {self._previous}) asks for {', '.join(map(str, unknown))}, which this run "
                f"does not have; it has {', '.join(map(str, self._places))}"
            )
        self._current = Stage(name, tuple(tenant for tenant in tenants if tenant in self._places))
        return self._current

    def _carry_out(self, planned: list[Move]) -> tuple[int, int]:
        """Bytes copied in and out."""
        bytes_in = bytes_out = 0
        for move in planned:
            if move.target == "device":
                bytes_in += self._blocks[move.tenant].come_back(move.source)
            else:
                bytes_out += self._blocks[move.tenant].leave(move.target)
        self._places = after(self._places, planned)
        if self._current is not None:
            for tenant in self._current.tenants:
                self._last[tenant] = self._current.name
                if self._current.changes(tenant):
                    self._blocks[tenant].have_changed()
        return bytes_in, bytes_out

    def _require_room(self, stage: Stage, places: Mapping[Tenant, Place]) -> None:
        """Every rank fails together. Collective over the world where there is a budget."""
        if not self._budget_bytes:
            return
        since = {tenant: self._last[tenant] for tenant, place in places.items() if place == "device"}
        sizes = {tenant: self._blocks[tenant].num_bytes for tenant in since} | self._passing
        since |= dict.fromkeys(self._passing, stage.name)
        problem = over_budget(stage, since, sizes, self._budget_bytes)
        found = next((text for text in gather_objects(problem) if text), None)
        if found:
            raise ResidencyError(found)

    def _resident(self) -> dict[Tenant, dict[Place, int]]:
        found = {tenant: {place: self._blocks[tenant].num_bytes} for tenant, place in self._places.items()}
        found |= {tenant: {self._homes[tenant]: weights.num_bytes} for tenant, weights in self._exchanged.items()}
        found |= {tenant: {"device": size} for tenant, size in self._passing.items()}
        return {tenant: places for tenant, places in found.items() if "gone" not in places}


def _where(place: Place) -> str:
    return {"host": "it waits on the host", "disk": "it waits on disk", "gone": "its memory was freed"}[place]
