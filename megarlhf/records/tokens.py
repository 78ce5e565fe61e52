"""The valid tokens of a micro-batch as flat vectors: what a loss reads. Padding does not exist here."""

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from megarlhf.records.experience import Experience

_SOURCES = {
    "logp_old": "logp_start",
    "logp_rollout": "logp_rollout",
    "logp_reference": "logp_reference",
    "value": "value",
    "advantage": "advantage",
    "target": "target",
}


@dataclass(frozen=True)
class TokenBatch:
    """N valid tokens in row-major order of the mask: row by row, left to right. A field not filled yet is None."""

    row: Tensor
    """[N] int64: row within the micro-batch."""
    num_rows: int
    """Rows of the micro-batch, those without a valid token included."""
    logp_old: Tensor | None = None
    """[N] float32: log-prob before the step's first update, recomputed in the training layout."""
    logp_rollout: Tensor | None = None
    """[N] float32: log-prob as the sampler saw it."""
    logp_reference: Tensor | None = None
    """[N] float32."""
    value: Tensor | None = None
    """[N] float32: value at rollout."""
    advantage: Tensor | None = None
    """[N] float32."""
    target: Tensor | None = None
    """[N] float32."""

    def __post_init__(self) -> None:
        for name in _SOURCES:
            value = self.__dict__[name]
            fits = value is None or value.shape == self.row.shape
            assert fits, f"{name}: shape {list(value.shape)} instead of {list(self.row.shape)}"

    @classmethod
    def from_experience(cls, experience: Experience) -> Self:
        """The valid tokens of all rows, in the order of `pack_rows(...).logit_positions` for those rows."""
        mask = experience.mask
        sources = {name: experience.__dict__[source] for name, source in _SOURCES.items()}
        flat = {name: None if value is None else value[mask] for name, value in sources.items()}
        return cls(row=mask.nonzero()[:, 0], num_rows=experience.num_rows, **flat)

    @property
    def num_tokens(self) -> int:
        return self.row.shape[0]

    def to(self, device: torch.device) -> Self:
        """A copy on `device`."""
        values = {item.name: self.__dict__[item.name] for item in fields(self)}
        return replace(self, **{name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)})
