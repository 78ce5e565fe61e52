"""Log-probabilities and entropy of next tokens straight from hidden states, with the vocabulary cut over tensor ranks.

The logits are never whole: positions are taken in chunks and the vocabulary in tiles. The backward pass finds the first
tiles as the forward pass left them, up to a bound in bytes, and computes the others again. With z = h W^T / temperature
over the true vocabulary and p = softmax(z):

    logp = z_target - logsumexp(z)                dlogp/dz_j = [j = target] - p_j
    entropy = logsumexp(z) - sum_j p_j z_j        dentropy/dz_j = -p_j (z_j - sum_k p_k z_k)

Gradients are exact for both (closed forms above), so no collective has to be differentiated. Sums over the vocabulary
are of exp(z - m) with m the largest logit so far, and scaled when m grows (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018). Some models cap their logits y softly: with a cap c, z = c tanh(y / c) / temperature,
and dz/dy = (1 - tanh(y / c)^2) / temperature.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from megarlhf import device

CHUNK_TOKENS = 1024
KEPT_BYTES = 256 * 2**20
"""Logits that are kept from a forward pass for its backward pass."""
_LOWEST = torch.finfo(torch.float32).min


class _Head(NamedTuple):
    """This rank's part of the vocabulary head, and how to read its logits."""

    weight: torch.Tensor
    """[V/tp, H]"""
    first: int
    """Vocabulary id of the first row."""
    num_true: int
    """Rows that are true vocabulary; the padding comes after them."""
    temperature: float
    softcap: float | None
    group: dist.ProcessGroup
    tile_bytes: int
    """Most bytes of logits at once."""

    def tile_rows(self, num_tokens: int) -> int:
        """Rows of a tile of logits of `num_tokens` positions."""
        return max(1, min(self.tile_bytes // (4 * max(1, num_tokens)), self.num_true))

    def tiles(self, num_tokens: int) -> Iterator[slice]:
        """The true rows, a tile at a time."""
        step = self.tile_rows(num_tokens)
        for start in range(0, self.num_true, step):
            yield slice(start, min(start + step, self.num_true))

    def scratch(self, num_tokens: int) -> torch.Tensor:
        """Memory for a tile, flat, that is written again and again: fresh memory costs more than the arithmetic."""
        shape = (num_tokens * self.tile_rows(num_tokens),)
        return torch.empty(shape, dtype=torch.float32, device=self.weight.device)

    def logits(self, hidden: torch.Tensor, tile: slice, out: torch.Tensor | None) -> torch.Tensor:
        """[n, H] -> [n, v] float32, capped and divided by the temperature; in `out`, perhaps. Local."""
        logits = device.linear_float32(hidden, self.weight[tile], out)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def places(self, targets: torch.Tensor, tile: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """(positions whose target is in the tile, its column there), equally long."""
        column = targets - (self.first + tile.start)
        found = ((targets >= 0) & (column >= 0) & (column < tile.stop - tile.start)).nonzero()[:, 0]
        return found, column[found]


def soft_capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(scores / cap), in the dtype of `scores` (Gemma 2, arXiv:2408.00118, section 2)."""
    return (scores / cap).tanh_() * cap


class _Chunk(NamedTuple):
    """What the backward pass needs of each position besides its hidden state; all [n] float32."""

    logp: torch.Tensor
    log_normaliser: torch.Tensor
    mean_logit: torch.Tensor
    """sum_j p_j z_j; 0 where no entropy is asked for."""


def fused_logprob(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    tile_bytes: int | None = None,
    kept_bytes: int = KEPT_BYTES,
    weight_gradient: torch.Tensor | None = None,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each target and, when asked, the entropy of its distribution. Collective over `group`.

    hidden [N, H], the same on all ranks of `group`; weight [V/tp, H], rank r holding vocabulary rows r * V/tp onwards
    (V is the padded size); targets [N] int64, -1 or any negative number where nothing is asked: there logp and
    entropy are 0, and so are their gradients. Rows of `weight` from `vocab_size` on are padding and have probability
    0. Logits are capped by `softcap`, then divided by `temperature` once, before the softmax, for both results. At most
    `tile_bytes` of them (by default what suits the device) exist at once, for at most `chunk_tokens` positions, in up
    to three copies, beside at most `kept_bytes` that wait for the backward pass.

    Returns (logp [N], entropy [N] or None), float32 nats, the same on all ranks. The gradient of `hidden` is this
    rank's share, from its own vocabulary rows: whoever made `hidden` sums it over the group, as megatron-core's
    copy_to_tensor_model_parallel_region does (or gather_from_sequence_parallel_region with
    tensor_parallel_output_grad=True). The gradient of `weight` is whole, except that a weight which is used elsewhere
    too must still add that part; with `weight_gradient` [V/tp, H] float32 it is added there, and autograd gets none.

    Raises ValueError for a target outside the vocabulary.
    """
    if targets.numel() and int(targets.max()) >= vocab_size:
        raise ValueError(f"target {int(targets.max())} is not in a vocabulary of {vocab_size}")
    head_options = vocab_size, temperature, softcap, group, tile_bytes or device.block_bytes(weight)
    has_backward = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    plan = chunk_tokens, kept_bytes if has_backward else 0
    logp, entropy = _FusedLogprob.apply(hidden, weight, targets, head_options, plan, with_entropy, weight_gradient)
    return logp, entropy if with_entropy else None


class _FusedLogprob(torch.autograd.Function):
    """Chunk by chunk forward; chunk by chunk backward, from two saved numbers a position and what logits were kept."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, head_options, plan, with_entropy, weight_gradient):
        head, (chunk_tokens, kept_bytes) = _head(weight, *head_options), plan
        kept = _Kept(kept_bytes)
        parts = [
            _measure(head, hidden[at], targets[at], with_entropy, kept, at.start)
            for at in _chunks(len(hidden), chunk_tokens)
        ]
        logp, log_normaliser, mean_logit = (torch.cat(column) for column in zip(*parts, strict=True))
        valid = targets >= 0
        entropy = (log_normaliser - mean_logit).where(valid, 0.0)
        ctx.save_for_backward(hidden, weight, targets, log_normaliser, mean_logit)
        ctx.head_options, ctx.chunk_tokens, ctx.kept, ctx.weight_gradient = (
            head_options, chunk_tokens, kept, weight_gradient,
        )  # fmt: skip
        ctx.set_materialize_grads(False)  # an entropy that no loss reads costs nothing in the backward pass
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logp.where(valid, 0.0), entropy

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy):
        hidden, weight, targets, log_normaliser, mean_logit = ctx.saved_tensors
        head = _head(weight, *ctx.head_options)
        valid = targets >= 0
        grad_logp = torch.zeros_like(log_normaliser) if grad_logp is None else grad_logp.where(valid, 0.0)
        grad_entropy = None if grad_entropy is None else grad_entropy.where(valid, 0.0)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            is_added = ctx.weight_gradient is not None
            grad_weight = ctx.weight_gradient if is_added else torch.zeros_like(weight, dtype=torch.float32)
        for at in _chunks(len(hidden), ctx.chunk_tokens):
            slopes = grad_logp[at], None if grad_entropy is None else grad_entropy[at]
            known = targets[at], log_normaliser[at], mean_logit[at]
            scratch, other = head.scratch(len(hidden[at])), head.scratch(len(hidden[at]))
            for tile in head.tiles(len(hidden[at])):
                logits = ctx.kept.taken(at.start, tile)
                if logits is None:
                    logits = head.logits(hidden[at], tile, _block(scratch, hidden[at], tile))
                spare = _block(other, hidden[at], tile)
                grad_logits = _logit_gradient(head, logits, spare, tile, *known, *slopes).to(hidden.dtype)
                if grad_hidden is not None:
                    device.add_matmul_(grad_hidden[at], grad_logits, weight[tile])
                if grad_weight is not None:
                    device.add_matmul_(grad_weight[tile], grad_logits.t(), hidden[at])
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        grad_weight = None if grad_weight is None or is_added else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    """The positions; one empty chunk where there are none."""
    return [slice(start, start + chunk_tokens) for start in range(0, max(num_tokens, 1), chunk_tokens)]


def _block(memory: torch.Tensor, hidden: torch.Tensor, tile: slice) -> torch.Tensor:
    """The beginning of flat `memory` as [n, v], for positions [n, H] and a tile of v rows."""
    shape = len(hidden), tile.stop - tile.start
    return memory[: shape[0] * shape[1]].view(shape)


class _Kept:
    """Tiles of logits between a forward pass and its backward pass.

    Each is memory of its own, as a large block would be fresh memory every time.
    """

    def __init__(self, num_bytes: int):
        self._left = num_bytes // 4
        self._tiles: dict[tuple[int, int], torch.Tensor] = {}

    def has_room(self, hidden: torch.Tensor, tile: slice) -> bool:
        """Whether a tile's logits for these positions [n, H] can be kept."""
        return len(hidden) * (tile.stop - tile.start) <= self._left

    def keep(self, start: int, tile: slice, logits: torch.Tensor) -> None:
        """Of the positions from `start` on, [n, v]."""
        self._left -= logits.numel()
        self._tiles[start, tile.start] = logits

    def taken(self, start: int, tile: slice) -> torch.Tensor | None:
        """What was kept, which is forgotten: a second backward pass computes all tiles again."""
        return self._tiles.pop((start, tile.start), None)


def _head(
    weight: torch.Tensor,
    vocab_size: int,
    temperature: float,
    softcap: float | None,
    group: dist.ProcessGroup,
    tile_bytes: int,
) -> _Head:
    first = group.rank() * len(weight)
    num_true = min(max(vocab_size - first, 0), len(weight))
    return _Head(weight, first, num_true, temperature, softcap, group, tile_bytes)


def _measure(
    head: _Head, hidden: torch.Tensor, targets: torch.Tensor, with_entropy: bool, kept: _Kept, start: int
) -> _Chunk:
    """One chunk [n, H], [n] -> three times [n]. Collective over the head's group: a maximum, then one sum."""
    maximum = hidden.new_full((len(hidden),), _LOWEST, dtype=torch.float32)
    target_logit, normaliser, weighted = (torch.zeros_like(maximum) for _ in range(3))
    scratch, other = head.scratch(len(hidden)), head.scratch(len(hidden)) if with_entropy else None
    for tile in head.tiles(len(hidden)):
        spare = _block(scratch, hidden, tile)
        is_kept = kept.has_room(hidden, tile)
        logits = head.logits(hidden, tile, None if is_kept else spare)
        if is_kept:
            kept.keep(start, tile, logits)
        at, column = head.places(targets, tile)
        target_logit[at] = logits[at, column]
        higher = torch.maximum(maximum, logits.amax(dim=1))
        normaliser, weighted = _lowered(higher - maximum, normaliser, weighted)
        maximum = higher
        below = torch.sub(logits, maximum[:, None], out=spare)
        if other is None:
            weights = below.exp_()
        else:
            weights = torch.exp(below, out=_block(other, hidden, tile))
            weighted += below.mul_(weights).sum(dim=1)
        normaliser += weights.sum(dim=1)
    highest = maximum.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=head.group)
    normaliser, weighted = _lowered(highest - maximum, normaliser, weighted)
    sums = torch.stack([target_logit, normaliser, weighted])
    dist.all_reduce(sums, group=head.group)
    target_logit, normaliser, weighted = sums
    log_normaliser = normaliser.log() + highest
    mean_logit = weighted / normaliser + highest if with_entropy else weighted
    return _Chunk(target_logit - log_normaliser, log_normaliser, mean_logit)


def _lowered(rise: torch.Tensor, normaliser: torch.Tensor, weighted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """sum e^d and sum e^d d over logits that lie d below a maximum, once the maximum has risen by `rise`; all [n]."""
    factor = (-rise).exp()
    return normaliser * factor, (weighted - rise * normaliser) * factor


def _logit_gradient(
    head: _Head,
    logits: torch.Tensor,
    spare: torch.Tensor,
    tile: slice,
    targets: torch.Tensor,
    log_normaliser: torch.Tensor,
    mean_logit: torch.Tensor,
    grad_logp: torch.Tensor,
    grad_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient by the product of hidden states and a tile of the weight for one chunk, [n, v] float32, in the place of
    `logits`; `spare` is memory of their size. Local."""
    through = None
    if head.softcap is not None:
        through = (logits * (head.temperature / head.softcap)).square_().neg_().add_(1)
    if grad_entropy is None:
        gradient = logits.sub_(log_normaliser[:, None]).exp_().mul_(-grad_logp[:, None])
    else:
        probability = torch.sub(logits, log_normaliser[:, None], out=spare).exp_()
        factor = logits.sub_(mean_logit[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_logp[:, None])
        gradient = factor.mul_(probability)
    at, column = head.places(targets, tile)
    gradient[at, column] += grad_logp[at]
    if through is not None:
        gradient.mul_(through)
    return gradient if head.temperature == 1.0 else gradient.div_(head.temperature)
