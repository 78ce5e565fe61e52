"""The memory of one tenant, moved as a whole: bytes leave their storages and come back, tensors never notice.

megatron-core's parameters, `main_grad`s, optimizer shards and buckets are views of a few large buffers. What they share
is the storage; so it is the storage that is emptied (resized to nothing) and filled again, and every view of it, known
to us or not, is right again. No tensor is rebound. On a CPU the host copy is a copy too: one memory, but the same code.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from megarlhf import device
from megarlhf.errors import ResidencyError
from megarlhf.residency.files import BytesFile, bytes_of, checksum
from megarlhf.residency.stages import Place

Tensors = Callable[[], Iterable[torch.Tensor]]
"""What a tenant is made of; asked anew each time it leaves, because optimizer state begins with the first update."""


@dataclass(frozen=True)
class _Emptied:
    """A storage without its bytes, and what is needed to fill it."""

    storage: torch.UntypedStorage
    num_bytes: int
    host: torch.Tensor | None
    checksum: int | None


class Blocks:
    """The storages of a tenant's tensors."""

    def __init__(
        self,
        name: str,
        tensors: Tensors,
        path: Path,
        *,
        on_leave: Callable[[], None] | None = None,
        is_checked: bool = False,
    ):
        """`path`: file for what goes to disk. `on_leave` lets go of what was derived from the tensors. `is_checked`:
        what comes back is compared with what left."""
        self.name = name
        self._tensors = tensors
        self._file = BytesFile(path)
        self._on_leave = on_leave
        self._is_checked = is_checked
        self._is_stored = False  # the file says what the storages say, or said when they were emptied
        self._emptied: list[_Emptied] = []

    @property
    def num_bytes(self) -> int:
        """Size of the tenant, wherever it is."""
        if self._emptied:
            return sum(block.num_bytes for block in self._emptied)
        return sum(storage.nbytes() for storage in storages(self._tensors()))

    def have_changed(self) -> None:
        """A file written earlier no longer says what the storages say."""
        self._is_stored = False

    def leave(self, place: Place) -> int:
        """Empties the storages; their bytes go to host, to disk, or nowhere (gone). Returns the bytes copied.

        A file whose contents are still true is not written again.
        """
        assert not self._emptied, f"{self.name} left before"
        if self._on_leave is not None:
            self._on_leave()
        found = storages(self._tensors())
        is_copied = place == "host" or (place == "disk" and not self._is_stored)
        copied = sum(storage.nbytes() for storage in found) if is_copied else 0
        sums = [checksum(bytes_of(one)) if self._is_checked and place != "gone" else None for one in found]
        if place == "disk" and is_copied:
            for offset, storage in _places([storage.nbytes() for storage in found], found):
                self._file.write(offset, bytes_of(storage))
        self._is_stored = place == "disk"
        waiting = deque(found)
        while waiting:
            group = _together(waiting)
            hosts = _to_host(group) if place == "host" else [None] * len(group)
            for storage, host in zip(group, hosts, strict=True):
                self._emptied.append(_Emptied(storage, storage.nbytes(), host, sums[len(self._emptied)]))
                storage.resize_(0)
        return copied

    def come_back(self, place: Place) -> int:
        """Fills the storages with what left for `place`, or with zeros if that is gone. Returns the bytes copied.

        Raises ResidencyError when a checksum tells of other bytes than left.
        """
        blocks, self._emptied = self._emptied, []
        sizes, sums = [block.num_bytes for block in blocks], [block.checksum for block in blocks]
        found = [block.storage for block in blocks]
        waiting = deque(blocks)
        blocks.clear()  # a copy on the host is let go of before memory for the next block is taken
        while waiting:
            group = _together(waiting)
            for block in group:
                block.storage.resize_(block.num_bytes)
            _fill(group, place)
        if place == "disk":
            for offset, storage in _places(sizes, found):
                self._file.read(offset, bytes_of(storage))
        for number, (storage, total) in enumerate(zip(found, sums, strict=True)):
            if total is not None and checksum(bytes_of(storage)) != total:
                raise ResidencyError(
                    f"{self.name}: block {number} of {len(found)} came back from {place} with other bytes than left "
                    "(residency.check_transfers); the copy failed, not your settings"
                )
        return 0 if place == "gone" else sum(sizes)

    def close(self) -> None:
        """Removes the file."""
        self._file.remove()


def storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages that hold the tensors, each once, in the order in which they are first met; none without bytes."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage._cdata, storage)
    return list(found.values())


Item = TypeVar("Item")


def _together(items: deque[Item]) -> list[Item]:
    """Takes what is copied next: all at once on a GPU; one where both copies are in the same memory."""
    return [items.popleft() for _ in range(1 if device.is_host() else len(items))]


def _to_host(group: list[torch.UntypedStorage]) -> list[torch.Tensor]:
    """Copies in (pinned) host memory, made beside the computation and waited for: the storages are emptied next."""
    hosts = [device.pinned_empty(storage.nbytes()) for storage in group]
    with device.beside_computation():
        for storage, host in zip(group, hosts, strict=True):
            host.copy_(bytes_of(storage), non_blocking=True)
    device.wait_for_copies()
    return hosts


def _fill(group: list[_Emptied], place: Place) -> None:
    """From the host's copies, or with zeros."""
    if place == "host":
        with device.beside_computation():
            for block in group:
                assert block.host is not None, "what left for the host has a copy there"
                bytes_of(block.storage).copy_(block.host, non_blocking=True)
        device.copies_are_next()
    elif place == "gone":
        for block in group:
            bytes_of(block.storage).zero_()


def _places(sizes: list[int], found: list[torch.UntypedStorage]) -> Iterable[tuple[int, torch.UntypedStorage]]:
    """(offset in the file, storage)."""
    offset = 0
    for size, storage in zip(sizes, found, strict=True):
        yield offset, storage
        offset += size
