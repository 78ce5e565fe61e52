"""What a loss reads: the valid tokens of a micro-batch as flat vectors, what the model said about them, and counts.

Padding does not exist here.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from megarlhf.records.experience import Experience, valid_values
from megarlhf.records.shards import WHOLE, Shard

_SOURCES = {
    "logp_old": "logp_start",
    "logp_rollout": "logp_rollout",
    "logp_reference": "logp_reference",
    "value": "value",
    "advantage": "advantage",
    "target": "target",
}
_ROW_FIELDS = ("preference", "margin", "score", "attributes", "finished")


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
    group: Tensor | None = None
    """[R] int64, R = num_rows: group of each row, counted from 0 within the micro-batch."""
    preference: Tensor | None = None
    """[R] float32: larger is better within the group."""
    margin: Tensor | None = None
    """[R] float32: by how much the row should win."""
    score: Tensor | None = None
    """[R] float32: the reward's score, or the one that an answer was given by hand."""
    attributes: Tensor | None = None
    """[R, K] float32: several scores that an answer was given by hand; NaN where one is missing."""
    finished: Tensor | None = None
    """[R] bool: the response ended with a stop token."""

    def __post_init__(self) -> None:
        sizes = dict.fromkeys(_SOURCES, self.num_tokens) | dict.fromkeys(("group", *_ROW_FIELDS), self.num_rows)
        for name, size in sizes.items():
            value = self.__dict__[name]
            fits = value is None or (value.shape[:1] if name == "attributes" else value.shape) == (size,)
            assert fits, f"{name}: shape {list(value.shape)} instead of [{size}]"

    @classmethod
    def from_experience(cls, experience: Experience) -> Self:
        """The valid tokens of all rows, in the order of `pack_rows(...).logit_positions` for those rows."""
        mask = experience.mask
        sources = {name: experience.__dict__[source] for name, source in _SOURCES.items()}
        flat = {name: None if value is None else valid_values(value, mask) for name, value in sources.items()}
        of_rows = {name: experience.__dict__[name] for name in _ROW_FIELDS}
        group = experience.group.unique(return_inverse=True)[1]
        return cls(row=mask.nonzero()[:, 0], num_rows=experience.num_rows, group=group, **flat, **of_rows)

    @property
    def num_tokens(self) -> int:
        return self.row.shape[0]

    def to(self, device: torch.device) -> Self:
        """A copy on `device`."""
        values = {item.name: self.__dict__[item.name] for item in fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True)
class Prediction:
    """What the model in training says about N valid tokens; it carries the gradient."""

    value: Tensor
    """[N] float32: log-probs in nats (vocabulary head) or values (value head; [N, K] of K > 1 labels)."""
    entropy: Tensor | None = None
    """[N] float32, nats: of the distribution that the token was drawn from; only where the algorithm asks for it."""


@dataclass(frozen=True)
class Denominators:
    """What a loss is divided by: counts of the *whole* global minibatch, over all micro-batches and ranks."""

    tokens: float
    """Valid tokens."""
    rows: float
    """Rows with a valid token."""
    groups: float
    """Groups with such a row."""

    @classmethod
    def of(cls, minibatch: Experience, shard: Shard = WHOLE) -> Self:
        """The counts of the minibatch of which this is a `shard`; groups lie in one. Collective over the shards."""
        valid = minibatch.mask.any(dim=1)
        groups = minibatch.group[valid].unique().numel()
        return cls(*shard.sum(torch.tensor([minibatch.num_tokens, int(valid.sum()), groups])).tolist())
