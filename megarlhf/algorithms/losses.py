"""Losses of a micro-batch's valid tokens, divided by a denominator of the whole global minibatch.

A micro-batch returns sum over its tokens / denominator, where the denominator counts the valid tokens of all
micro-batches and data-parallel ranks. Gradients that are *summed* over both then do not depend on the split.
"""

import torch
from torch import Tensor

from megarlhf.config.algorithms import PPO
from megarlhf.records import Denominators, Mean, Metric, Prediction, TokenBatch


def clipped_policy_loss(
    prediction: Prediction, tokens: TokenBatch, settings: PPO, denominators: Denominators
) -> tuple[Tensor, dict[str, Metric]]:
    """PPO's clipped surrogate (Schulman et al., 2017, equation 7), to be minimised, with separate bounds.

    Per token: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logp - logp_old).
    Returns (scalar, metrics per token):

    loss/policy_avg       the loss
    policy/approxkl_avg   (logp - logp_old)^2 / 2, an estimate of KL(old, new) in nats
    policy/clipfrac_avg   how often the clipped term is the larger one, which stops the gradient
    val/ratio             r
    """
    assert tokens.logp_old is not None and tokens.advantage is not None, "tokens lack logp_old or advantage"
    difference = _checked(prediction, tokens) - tokens.logp_old
    ratio = difference.exp()
    unclipped = -tokens.advantage * ratio
    clipped = -tokens.advantage * ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    losses = torch.maximum(unclipped, clipped)
    metrics: dict[str, Metric] = {
        "loss/policy_avg": _mean(losses),
        "policy/approxkl_avg": _mean(0.5 * difference.square()),
        "policy/clipfrac_avg": _mean(clipped > unclipped),
        "val/ratio": _mean(ratio),
    }
    return _share(losses, denominators.tokens), metrics


def clipped_value_loss(
    prediction: Prediction, tokens: TokenBatch, settings: PPO, denominators: Denominators
) -> tuple[Tensor, dict[str, Metric]]:
    """Squared error of the value, pessimistic about leaving the neighbourhood of the value at rollout.

    Per token: max((v - target)^2, (v_clipped - target)^2) / 2 with v_clipped = clip(v, v_old - c, v_old + c), or the
    plain squared error when `value_clip` c is 0.
    Returns (scalar, metrics per token): loss/value_avg; val/clipfrac_avg, how often the clipped term is the larger.
    """
    assert tokens.value is not None and tokens.target is not None, "tokens lack value or target"
    value = _checked(prediction, tokens)
    error = (value - tokens.target).square()
    if settings.value_clip <= 0:
        return _share(0.5 * error, denominators.tokens), {"loss/value_avg": _mean(0.5 * error)}
    near = value.clamp(tokens.value - settings.value_clip, tokens.value + settings.value_clip)
    clipped_error = (near - tokens.target).square()
    losses = 0.5 * torch.maximum(error, clipped_error)
    metrics: dict[str, Metric] = {
        "loss/value_avg": _mean(losses),
        "val/clipfrac_avg": _mean(clipped_error > error),
    }
    return _share(losses, denominators.tokens), metrics


def _checked(prediction: Prediction, tokens: TokenBatch) -> Tensor:
    values = prediction.value
    assert values.shape == tokens.row.shape, f"{list(values.shape)} values for {list(tokens.row.shape)} valid tokens"
    assert values.dtype == torch.float32, f"losses are computed in float32, not {values.dtype}"
    return values


def _share(losses: Tensor, denominator: float) -> Tensor:
    """A minibatch without a valid token has loss 0 and gradient 0, not 0 / 0."""
    return losses.sum() / max(denominator, 1.0)


def _mean(values: Tensor) -> Mean:
    return Mean(values.detach().to(torch.float32).sum(), float(values.numel()))
