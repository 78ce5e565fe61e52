"""Advantages relative to the siblings of a group: the other responses to the same prompt.

Rows are matched by their group id, wherever they lie, and rows without a sampled token take no part. All results are
[B] float32 with 0 for such rows, for groups of one, and exactly 0 for groups of equal rewards.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_DEVIATION_EPSILON = 1e-6


@dataclass(frozen=True)
class _Groups:
    value: Tensor
    """[B] float64: 0 where not valid."""
    index: Tensor
    """[B] int64: group of each row, from 0."""
    size: Tensor
    """[B] float64: valid rows in each row's group."""
    total: Tensor
    """[B] float64: their sum."""


def _grouped(values: Tensor, group: Tensor, valid: Tensor) -> _Groups:
    index = group.unique(return_inverse=True)[1]
    wide = torch.where(valid, values.to(torch.float64), 0.0)
    return _Groups(wide, index, _sums(valid.to(torch.float64), index)[index], _sums(wide, index)[index])


def _sums(values: Tensor, index: Tensor) -> Tensor:
    return values.new_zeros(int(index.max()) + 1 if index.numel() else 0).index_add(0, index, values)


def centred(values: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """[B] float64: values [B] less the mean of their group [B] over the rows that are valid [B]."""
    of = _grouped(values, group, valid)
    return torch.where(valid, of.value - of.total / of.size.clamp(min=1), 0.0)


def group_relative(values: Tensor, group: Tensor, valid: Tensor, std: Literal["unbiased", "biased", "none"]) -> Tensor:
    """GRPO: (r - mean) / (std + 1e-6) over the group (Shao et al., DeepSeekMath, 2024, section 4.1.2).

    The variance is divided by count - 1 ("unbiased") or by count; "none" divides by nothing (Liu et al., "Understanding
    R1-Zero-like training", 2025: Dr. GRPO).
    """
    distance, of = centred(values, group, valid), _grouped(values, group, valid)
    if std == "none":
        return distance.to(torch.float32)
    variance = _sums(distance.square(), of.index)[of.index] / (of.size - float(std == "unbiased")).clamp(min=1)
    return (distance / (variance.sqrt() + _DEVIATION_EPSILON)).to(torch.float32)


def leave_one_out(values: Tensor, group: Tensor, valid: Tensor, *, divide_by_peer_std: bool = False) -> Tensor:
    """RLOO: r - mean of the other rows of the group (Ahmadian et al., "Back to Basics", 2024, equation 8).

    With `divide_by_peer_std` divided by the others' unbiased deviation, except where that is 0 (below 1e-6): such an
    advantage keeps its scale.
    """
    of = _grouped(values, group, valid)
    peers = (of.size - 1).clamp(min=1)
    advantage = torch.where(valid & (of.size > 1), (of.size * of.value - of.total) / peers, 0.0)
    if divide_by_peer_std:
        # Of n values with distances d to their mean, the others' squared distances to their own are sum(d^2) less
        # d^2 n / (n - 1); of others that are all equal, rounding leaves some 1e-8 of d.
        distance = centred(values, group, valid)
        squares = _sums(distance.square(), of.index)[of.index] - distance.square() * of.size / peers
        deviation = (squares.clamp(min=0) / (of.size - 2).clamp(min=1)).sqrt()
        varies = deviation > (1e-7 * distance.abs()).clamp(min=_DEVIATION_EPSILON)
        advantage = torch.where(varies, advantage / deviation, advantage)
    return advantage.to(torch.float32)


def has_signal(values: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """[B] bool: the row's group holds different values, so that some advantage in it is not 0 (DAPO samples until
    enough groups do; Yu et al., 2025, equation 11)."""
    distance, of = centred(values, group, valid), _grouped(values, group, valid)
    return _sums((distance != 0).to(torch.float64), of.index)[of.index] > 0
