"""A second set of weights for an allocated model: kept elsewhere, exchanged in while a `with` block runs.

The reference needs no module of its own: it is the actor's training module holding other weights for one stage.
"""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megarlhf import device
from megarlhf.errors import ResidencyError
from megarlhf.residency.files import BytesFile, bytes_of, checksum


class Snapshot:
    """Copies of parameters on the host, the device or disk: it holds whichever set of weights is not in the module."""

    def __init__(
        self,
        parameters: Mapping[Any, torch.nn.Parameter],
        *,
        on_device: bool = False,
        file: Path | None = None,
        is_checked: bool = False,
    ):
        """Copies `parameters` as they are now: to the host, or to `file`, or beside them on their device.

        `is_checked`: what is exchanged in is compared with what was put there.
        """
        self._file = None if file is None else BytesFile(file)
        self._kept: dict[Any, torch.Tensor] = {}
        self._offsets: dict[Any, int] = {}
        self._keys = parameters.keys()
        self._inside = False
        self._sums = {key: checksum(bytes_of(one)) for key, one in parameters.items()} if is_checked else {}
        self.num_bytes = 0
        """Memory or disk held."""
        self.bytes_exchanged = 0
        """Bytes copied so far, into the module and out of it."""
        for key, parameter in parameters.items():
            self._offsets[key] = self.num_bytes
            self.num_bytes += parameter.nbytes
            if self._file is not None:
                self._file.write(self._offsets[key], bytes_of(parameter))
            else:
                self._kept[key] = parameter.detach().clone() if on_device else device.pinned(parameter)

    @contextmanager
    def swapped_in(self, parameters: Mapping[Any, torch.nn.Parameter]) -> Iterator[None]:
        """Inside the block `parameters` hold the snapshot; afterwards they are bit for bit what they were.

        Extra memory: one parameter at a time. Parameters stay the same objects in the same storage, so that views of
        gradient and optimizer buffers keep pointing at them.
        """
        assert not self._inside, "the snapshot is already swapped in; leave the first block before entering another"
        self._exchange(parameters)
        self._inside = True
        try:
            yield
        finally:
            self._exchange(parameters)
            self._inside = False

    def close(self) -> None:
        """Removes the file."""
        if self._file is not None:
            self._file.remove()

    @torch.no_grad()
    def _exchange(self, parameters: Mapping[Any, torch.nn.Parameter]) -> None:
        assert parameters.keys() == self._keys, "the snapshot was taken of a model with other parameters"
        for key, parameter in parameters.items():
            ours = parameter.detach().clone()
            if self._file is None:  # on a GPU both copies follow each other on the device, and nothing waits for them
                parameter.copy_(self._kept[key], non_blocking=True)
                self._kept[key].copy_(ours, non_blocking=True)
            else:
                self._file.read(self._offsets[key], bytes_of(parameter))
                self._file.write(self._offsets[key], bytes_of(ours))
            self.bytes_exchanged += 2 * parameter.nbytes
            if self._sums:
                self._verify(key, parameter, ours)

    def _verify(self, key: Hashable, arrived: torch.Tensor, kept: torch.Tensor) -> None:
        if checksum(bytes_of(arrived)) != self._sums[key]:
            raise ResidencyError(
                f"{key}: other bytes were exchanged in than had been put aside (residency.check_transfers); the copy "
                "failed, not your settings"
            )
        self._sums[key] = checksum(bytes_of(kept))
