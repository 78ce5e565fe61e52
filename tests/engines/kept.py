"""How many bytes autograd keeps for the backward pass, counted by storage while they are kept."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch


@dataclass
class KeptBytes:
    """A context manager; afterwards `peak` is the most bytes of saved tensors alive at once, `exclude`d ones apart.

    A storage counts once and whole, however many views of it are saved, as it occupies memory.
    """

    exclude: Iterable[torch.Tensor] = ()
    """Tensors that live anyway: weights, buffers."""
    peak: int = 0
    _now: int = 0
    _uses: dict[int, int] = field(default_factory=dict)

    def __enter__(self) -> "KeptBytes":
        self._apart = {tensor.untyped_storage().data_ptr() for tensor in self.exclude}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Kept(tensor, self), lambda kept: kept.it)
        self._hooks.__enter__()
        return self

    def __exit__(self, *problem) -> None:
        self._hooks.__exit__(*problem)

    def count(self, tensor: torch.Tensor, change: int) -> None:
        """A saved tensor comes (1) or goes (-1)."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._apart:
            return
        uses = self._uses.get(storage.data_ptr(), 0)
        if uses == 0 or uses + change == 0:
            self._now += change * storage.nbytes()
        self._uses[storage.data_ptr()] = uses + change
        self.peak = max(self.peak, self._now)


class _Kept:
    def __init__(self, tensor: torch.Tensor, meter: KeptBytes):
        self.it, self.meter = tensor.detach(), meter
        meter.count(self.it, 1)

    def __del__(self):
        self.meter.count(self.it, -1)
