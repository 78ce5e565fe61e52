"""Additive causal masks, made once and cut to size.

How far a key lies behind its query depends on their difference alone, so every mask is a part of a larger one.
"""

import torch
from torch import Tensor


class Masks:
    """The largest masks that were asked for, for each window and dtype; they live as long as a forward pass."""

    def __init__(self):
        self._largest: dict[tuple[int | None, torch.dtype], tuple[int, Tensor]] = {}

    def causal(self, before: int, num_queries: int, window: int | None, like: Tensor) -> Tensor:
        """[Q, before + Q] of Q = `num_queries`, in dtype and on the device of `like`: -inf where the key comes after
        the query or `window` tokens or more before it, else 0. `before` keys precede the first query."""
        furthest, mask = self._largest.get((window, like.dtype), (0, None))
        if mask is None or furthest < before or len(mask) < num_queries:
            rows, furthest = max(num_queries, 0 if mask is None else len(mask)), max(furthest, before)
            mask = _causal(furthest, rows, window, like)
            self._largest[window, like.dtype] = furthest, mask
        # Whole rows: on a GPU, kernels want what they are given to be aligned.
        return mask[:num_queries, furthest - before : furthest + num_queries].contiguous()


def _causal(before: int, num_queries: int, window: int | None, like: Tensor) -> Tensor:
    places = torch.arange(before + num_queries, device=like.device)
    behind = places[before:, None] - places
    hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
    return torch.zeros(behind.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)
