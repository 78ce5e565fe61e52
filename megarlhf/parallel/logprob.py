"""Log-probabilities and entropy of next tokens straight from hidden states, with the vocabulary cut over tensor ranks.

The logits are never whole: positions are taken in chunks, and the backward pass computes each chunk's logits again.
With z = h W^T / temperature over the true vocabulary and p = softmax(z):

    logp = z_target - logsumexp(z)                dlogp/dz_j = [j = target] - p_j
    entropy = logsumexp(z) - sum_j p_j z_j        dentropy/dz_j = -p_j (z_j - sum_k p_k z_k)

Gradients are exact for both (closed forms above), so no collective has to be differentiated. Some models cap their
logits y softly: with a cap c, z = c tanh(y / c) / temperature, and dz/dy = (1 - tanh(y / c)^2) / temperature.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from megarlhf import device

CHUNK_TOKENS = 1024


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

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V/tp] float32, capped and divided by the temperature; padded columns are -inf. Local."""
        logits = device.matmul_float32(hidden, self.weight.t())
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        logits.div_(self.temperature)
        logits[:, self.num_true :] = -torch.inf
        return logits

    def through(self, gradient: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """From the gradient by `logits` [n, V/tp] to that by the product of hidden states and weight, in place. Local.

        Padded columns have gradient 0.
        """
        gradient.div_(self.temperature)
        if self.softcap is not None:
            tanh = logits[:, : self.num_true] * (self.temperature / self.softcap)
            gradient[:, : self.num_true] *= 1 - tanh.square_()
        return gradient


def soft_capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(scores / cap), in the dtype of `scores` (Gemma 2, arXiv:2408.00118, section 2)."""
    return (scores / cap).tanh_() * cap


class _Chunk(NamedTuple):
    """What the backward pass needs of each position besides its hidden state; all [n] float32."""

    logp: torch.Tensor
    log_normaliser: torch.Tensor
    mean_logit: torch.Tensor
    """sum_j p_j z_j"""


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
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each target and, when asked, the entropy of its distribution. Collective over `group`.

    hidden [N, H], the same on all ranks of `group`; weight [V/tp, H], rank r holding vocabulary rows r * V/tp onwards
    (V is the padded size); targets [N] int64, -1 or any negative number where nothing is asked: there logp and
    entropy are 0, and so are their gradients. Rows of `weight` from `vocab_size` on are padding and have probability
    0. Logits are capped by `softcap`, then divided by `temperature` once, before the softmax, for both results.

    Returns (logp [N], entropy [N] or None), float32 nats, the same on all ranks. The gradient of `hidden` is this
    rank's share, from its own vocabulary rows: whoever made `hidden` sums it over the group, as megatron-core's
    copy_to_tensor_model_parallel_region does (or gather_from_sequence_parallel_region with
    tensor_parallel_output_grad=True). The gradient of `weight` is whole, except that a weight which is used elsewhere
    too must still add that part.

    Raises ValueError for a target outside the vocabulary.
    """
    if targets.numel() and int(targets.max()) >= vocab_size:
        raise ValueError(f"target {int(targets.max())} is not in a vocabulary of {vocab_size}")
    logp, entropy = _FusedLogprob.apply(
        hidden, weight, targets, (vocab_size, temperature, softcap, group), chunk_tokens, with_entropy
    )
    return logp, entropy if with_entropy else None


class _FusedLogprob(torch.autograd.Function):
    """Chunk by chunk forward; chunk by chunk again backward, from two saved numbers a position."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, head_options, chunk_tokens, with_entropy):
        head = _head(weight, *head_options)
        parts = [
            _measure(head, piece, target)
            for piece, target in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
        ]
        empty = hidden.new_zeros(0, dtype=torch.float32)
        logp, log_normaliser, mean_logit = (torch.cat([empty, *column]) for column in zip(*parts, strict=True))
        valid = targets >= 0
        entropy = (log_normaliser - mean_logit).where(valid, 0.0)
        ctx.save_for_backward(hidden, weight, targets, log_normaliser, mean_logit)
        ctx.head_options = head_options
        ctx.chunk_tokens = chunk_tokens
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
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = None
        for start in range(0, len(hidden), ctx.chunk_tokens):
            at = slice(start, start + ctx.chunk_tokens)
            grad_logits = _logit_gradient(
                head,
                hidden[at],
                targets[at],
                log_normaliser[at],
                mean_logit[at],
                grad_logp[at],
                None if grad_entropy is None else grad_entropy[at],
            ).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[at] = grad_logits @ weight
            if ctx.needs_input_grad[1]:
                product = (grad_logits.t() @ hidden[at]).float()
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _head(
    weight: torch.Tensor, vocab_size: int, temperature: float, softcap: float | None, group: dist.ProcessGroup
) -> _Head:
    first = group.rank() * len(weight)
    num_true = min(max(vocab_size - first, 0), len(weight))
    return _Head(weight, first, num_true, temperature, softcap, group)


def _measure(head: _Head, hidden: torch.Tensor, targets: torch.Tensor) -> _Chunk:
    """One chunk [n, H], [n] -> three times [n]. Collective over the head's group: a maximum, then one sum."""
    logits = head.logits(hidden)
    maximum = logits.amax(dim=1)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=head.group)
    logits -= maximum[:, None]
    column, is_mine = _columns(head, targets)
    target_logit = logits.gather(1, column[:, None]).squeeze(1).where(is_mine, 0.0)
    weights = logits.exp()
    weighted = (weights * logits.nan_to_num_(neginf=0.0)).sum(dim=1)
    sums = torch.stack([target_logit, weights.sum(dim=1), weighted])
    dist.all_reduce(sums, group=head.group)
    target_logit, normaliser, weighted = sums
    log_normaliser = normaliser.log()
    return _Chunk(target_logit - log_normaliser, log_normaliser + maximum, weighted / normaliser + maximum)


def _logit_gradient(
    head: _Head,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    log_normaliser: torch.Tensor,
    mean_logit: torch.Tensor,
    grad_logp: torch.Tensor,
    grad_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient by this rank's product of hidden states and weight for one chunk, [n, V/tp] float32. Local."""
    logits = head.logits(hidden)
    probability = (logits - log_normaliser[:, None]).exp()
    factor = -grad_logp[:, None]
    if grad_entropy is not None:
        above_mean = logits.nan_to_num(neginf=0.0) - mean_logit[:, None]
        factor = factor - grad_entropy[:, None] * above_mean
    gradient = probability * factor
    column, is_mine = _columns(head, targets)
    gradient.scatter_add_(1, column[:, None], grad_logp.where(is_mine, 0.0)[:, None])
    return head.through(gradient, logits)


def _columns(head: _Head, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(local column of each target, 0 where it is not here; whether it is here), both [n]."""
    column = targets - head.first
    is_mine = (targets >= 0) & (column >= 0) & (column < head.num_true)
    return column.where(is_mine, 0), is_mine
