"""Attention of one token of each active slot over the cache.

Of a decoding step on a CPU, torch's fused kernel takes a quarter: it multiplies 3 or 4 queries at a time by the keys of
one sequence and group, one small product after the other. In float32 two other kernels do the same work in less than
two thirds of the time: scores by one batched product, and the weighted sum of values as what it is, a sum of rows with
weights, for which torch has `embedding_bag` (SmolLM2-135M, 32 slots of 100 tokens: 0.35 ms a layer, not 0.58). A
bfloat16 model attends in float32 too, as a batched product would round its scores to 8 bits.
"""

from collections.abc import Callable, Sequence

import torch

from megarlhf.engines.generator.cache import Cache
from megarlhf.models.attention import Scoring, masked_attention
from megarlhf.parallel.logprob import soft_capped

Attention = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer, query [A, kv_groups/tp, heads of a group, D]) -> [A, heads/tp * D]."""


def attention_over(
    cache: Cache, scorings: Sequence[Scoring], num_heads: int, lengths: torch.Tensor, longest: int
) -> Attention:
    """Attention of the tokens at `lengths` [A] of slots 0 .. A-1, each over its slot's tokens up to itself.

    `scorings` are the layers', `num_heads` is heads/tp, `longest` is max(lengths) + 1.
    """
    masks = {window: _mask(lengths, longest, window, cache.blocks.dtype) for window in {one.window for one in scorings}}
    if cache.blocks.device.type == "cpu":
        return _by_bags(cache, scorings, num_heads, masks, longest)

    def attention(layer: int, query: torch.Tensor) -> torch.Tensor:
        scoring, (keys, values) = scorings[layer], cache.read(layer, len(lengths), longest)
        # the heads that share a group become its query positions: no repeated keys
        return masked_attention(query, keys, values, masks[scoring.window][:, None, None], scoring).flatten(1)

    return attention


def _by_bags(
    cache: Cache, scorings: Sequence[Scoring], num_heads: int, masks: dict[int | None, torch.Tensor], longest: int
) -> Attention:
    """The same by batched products and weighted sums of rows, in float32."""
    _, _, num_slots, groups, capacity, size = cache.blocks.shape
    masks = {window: mask.repeat_interleave(groups, 0)[:, None] for window, mask in masks.items()}
    num_products = len(next(iter(masks.values())))
    rows = torch.arange(num_products)[:, None] * capacity + torch.arange(longest)
    bags = rows.repeat_interleave(num_heads // groups, 0).flatten()  # the cached tokens of each slot's heads
    starts = torch.arange(0, len(bags), longest)

    def attention(layer: int, query: torch.Tensor) -> torch.Tensor:
        scoring, (keys, values) = scorings[layer], cache.rows[layer].view(2, num_slots * groups * capacity, size)
        keys = keys.as_strided((num_products, size, longest), (capacity * size, 1, size))
        dtype, query = query.dtype, query.flatten(0, 1).float()
        scale = size**-0.5 if scoring.scale is None else scoring.scale
        if scoring.softcap is None:
            scores = torch.baddbmm(masks[scoring.window], query, keys, alpha=scale)
        else:
            scores = soft_capped(torch.bmm(query, keys).mul_(scale), scoring.softcap).add_(masks[scoring.window])
        weights = scores.softmax(-1).flatten()
        context = torch.embedding_bag(values, bags, starts, False, 0, False, weights)[0]
        return context.view(num_products // groups, -1).to(dtype)

    return attention


def _mask(lengths: torch.Tensor, longest: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """[A, longest]: 0 for the cached tokens that the token at `lengths` [A] sees, -inf for the others."""
    places = torch.arange(longest, device=lengths.device)
    unseen = places > lengths[:, None]
    if window is not None:
        unseen |= places <= lengths[:, None] - window
    mask = torch.zeros(unseen.shape, dtype=dtype, device=lengths.device)
    return mask.masked_fill_(unseen, -torch.inf)
