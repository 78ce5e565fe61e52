"""A second set of weights for an allocated model: kept on the host, exchanged in while a `with` block runs.

The reference needs no module of its own: it is the actor's training module holding other weights for one stage.
"""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager

import torch

from megarlhf import device


class Snapshot:
    """Host copies of parameters. Whichever set of weights is not in the module is in the snapshot."""

    def __init__(self, parameters: Mapping[Hashable, torch.nn.Parameter]):
        """Copies `parameters` as they are now."""
        self._host = {key: device.pinned(parameter.detach().cpu().clone()) for key, parameter in parameters.items()}
        self._inside = False

    @property
    def num_bytes(self) -> int:
        """Host memory held."""
        return sum(tensor.nbytes for tensor in self._host.values())

    @contextmanager
    def swapped_in(self, parameters: Mapping[Hashable, torch.nn.Parameter]) -> Iterator[None]:
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

    @torch.no_grad()
    def _exchange(self, parameters: Mapping[Hashable, torch.nn.Parameter]) -> None:
        assert parameters.keys() == self._host.keys(), "the snapshot was taken of a model with other parameters"
        for key, parameter in parameters.items():
            ours = parameter.detach().to("cpu", copy=True)
            parameter.copy_(self._host[key])
            self._host[key].copy_(ours)
