"""A running average of a model's weights on the host, in float32, that can be looked at through the model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from megarlhf import device


class Average:
    """average <- decay * average + (1 - decay) * weights, for every call of `update`. Starts at the weights."""

    def __init__(self, parameters: Mapping[Any, torch.Tensor], decay: float):
        assert 0 <= decay < 1, f"decay is {decay}; an average has a decay of at least 0 and below 1"
        self._decay = decay
        # float32, whatever the weights are: bfloat16 cannot hold steps of a thousandth.
        self._host = {key: device.pinned(_host_copy(parameter)) for key, parameter in parameters.items()}
        self.bytes_exchanged = 0
        """Bytes copied so far, into a module and out of it."""

    @property
    def num_bytes(self) -> int:
        """Host memory held."""
        return sum(tensor.nbytes for tensor in self._host.values())

    def close(self) -> None:
        """Nothing is on disk."""

    @property
    def host(self) -> Mapping[Any, torch.Tensor]:
        """The average itself, on the host."""
        return self._host

    @torch.no_grad()
    def update(self, parameters: Mapping[Any, torch.Tensor]) -> None:
        """Moves the average towards the weights."""
        for key, average in self._host.items():
            average.lerp_(_host_copy(parameters[key]), 1 - self._decay)

    @contextmanager
    def swapped_in(self, parameters: Mapping[Any, torch.nn.Parameter]) -> Iterator[None]:
        """Inside the block those of `parameters` that are averaged hold the average; afterwards they are bit for bit
        what they were.

        Extra host memory: one copy of these weights.
        """
        ours = {key: parameters[key].detach().to("cpu", copy=True) for key in self._host}
        _fill(parameters, self._host)
        try:
            yield
        finally:
            _fill(parameters, ours)
            self.bytes_exchanged += 2 * sum(parameters[key].nbytes for key in self._host)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True)


@torch.no_grad()
def _fill(parameters: Mapping[Any, torch.nn.Parameter], values: Mapping[Any, torch.Tensor]) -> None:
    for key, value in values.items():
        parameters[key].copy_(value)
