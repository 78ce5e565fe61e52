"""Additive causal masks, made once for all layers and cut to size without a copy.

How far a key lies behind its query depends on their difference alone, so that every mask is a part of a larger one.
"""

import torch
from torch import Tensor

_ALIGNED = 8
"""Elements: kernels of a GPU want rows of a mask to begin at a multiple of 16 bytes."""


class Masks:
    """The largest masks that were asked for. They live as long as the forward and backward pass of a micro-batch."""

    def __init__(self):
        self._largest: dict[tuple, tuple[int, Tensor]] = {}

    def causal(self, before: int, num_queries: int, window: int | None, like: Tensor) -> Tensor:
        """[Q, before + Q] of Q = `num_queries`, in dtype and on the device of `like`: -inf where the key comes after
        the query or `window` tokens or more before it, else 0. `before` keys precede the first query."""
        # One for each place that a row may begin at, so that every part of it is aligned.
        kind = window, like.dtype, like.device, before % _ALIGNED
        furthest, mask = self._largest.get(kind, (before, None))
        if mask is None or furthest < before or len(mask) < num_queries:
            furthest, num_rows = max(furthest, before), max(num_queries, 0 if mask is None else len(mask))
            mask = _causal(furthest, num_rows, window, like)
            self._largest[kind] = furthest, mask
        return mask[:num_queries, furthest - before : furthest + num_queries]


def _causal(before: int, num_queries: int, window: int | None, like: Tensor) -> Tensor:
    """As `causal`, but with as many keys as make rows aligned."""
    keys = torch.arange(-(-(before + num_queries) // _ALIGNED) * _ALIGNED, device=like.device)
    behind = keys[before : before + num_queries, None] - keys
    hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
    return torch.zeros(behind.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)
