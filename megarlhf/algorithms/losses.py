"""Losses of policies that sample, and of their critic, over a micro-batch's valid tokens.

How they are averaged is said in means.py. Every metric has a name that does not depend on the tokens, so that all
ranks report the same ones.
"""

import torch
from torch import Tensor

from megarlhf.algorithms.divergence import ESTIMATORS
from megarlhf.algorithms.means import checked, loss_mean, mean, row_means, row_sums, share
from megarlhf.config.algorithms import PPO, PolicyGradient
from megarlhf.records import Denominators, Metric, Prediction, TokenBatch

LossAndMetrics = tuple[Tensor, dict[str, Metric]]
_LARGEST_EXPONENT = 80.0


def clipped_policy_loss(
    prediction: Prediction, tokens: TokenBatch, settings: PolicyGradient, denominators: Denominators
) -> LossAndMetrics:
    """The clipped surrogate (Schulman et al., PPO, 2017, equation 7), to be minimised, with separate bounds.

    Per token: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and where A < 0 at most -A dual_clip (Ye et al.,
    "Mastering complex control in MOBA games", 2020, equation 2), with r by `ratios`. Further terms: `with_terms`.

    Returns (scalar, metrics per token):
    loss/policy_avg       the loss with all its terms, averaged as the settings say
    policy/approxkl_avg   (logp - logp_old)^2 / 2, an estimate of KL(old, new) in nats
    policy/clipfrac_avg   how often a clipped term replaces the plain one, which stops the gradient
    val/ratio             r
    """
    difference, ratio = ratios(prediction, tokens, settings)
    plain = -tokens.advantage * ratio
    losses = torch.maximum(plain, -tokens.advantage * ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high))
    if settings.dual_clip > 0:
        bounded = torch.minimum(losses, -tokens.advantage * settings.dual_clip)
        losses = torch.where(tokens.advantage < 0, bounded, losses)
    metrics: dict[str, Metric] = {"policy/clipfrac_avg": mean(losses != plain)} | _ratio_metrics(difference, ratio)
    return with_terms(losses, metrics, prediction, tokens, settings, denominators)


def ppo_policy_loss(
    prediction: Prediction, tokens: TokenBatch, settings: PPO, denominators: Denominators
) -> LossAndMetrics:
    """`clipped_policy_loss`, or with policy_loss "penalty" PPO-KL (Schulman et al., 2017, equation 8).

    PPO-KL per token: -A r + penalty_coef * KL(old, new), where KL is estimated from the old policy's sample by
    exp(d) - 1 - d with d = logp - logp_old (k3 with the roles exchanged): never negative, gradient exp(d) - 1.
    """
    if settings.policy_loss == "clip":
        return clipped_policy_loss(prediction, tokens, settings, denominators)
    difference, ratio = ratios(prediction, tokens, settings)
    losses = -tokens.advantage * ratio + settings.penalty_coef * (torch.expm1(difference) - difference)
    return with_terms(losses, _ratio_metrics(difference, ratio), prediction, tokens, settings, denominators)


def ratios(prediction: Prediction, tokens: TokenBatch, settings: PolicyGradient) -> tuple[Tensor, Tensor]:
    """(logp - logp_old [N], ratio r [N]) with gradients.

    token          r_t = exp(d_t), d = logp - logp_old
    sequence       r = exp(sum of d over the response): the importance ratio of the whole response
    sequence_mean  r = exp(mean of d over the response) (Zheng et al., GSPO, 2025, equation 7)
    """
    assert tokens.logp_old is not None and tokens.advantage is not None, "tokens lack logp_old or advantage"
    difference = checked(prediction, tokens) - tokens.logp_old
    exponent = difference
    if settings.ratio != "token":
        of_rows = row_sums if settings.ratio == "sequence" else row_means
        exponent = of_rows(difference, tokens)[tokens.row]
    return difference, exponent.clamp(max=_LARGEST_EXPONENT).exp()


def with_terms(
    losses: Tensor,
    metrics: dict[str, Metric],
    prediction: Prediction,
    tokens: TokenBatch,
    settings: PolicyGradient,
    denominators: Denominators,
) -> LossAndMetrics:
    """(scalar, metrics) of policy losses [N] with the terms that the settings add, averaged as they say.

    importance_cap  the policy loss is weighted with min(exp(logp_old - logp_rollout), cap), without a gradient: the
                    trainer's policy differs from the sampler's (truncated importance sampling; Yao et al., 2025)
    kl_in loss      + kl_coef * estimator(logp, logp_reference)
    entropy_coef    - entropy_coef * entropy
    """
    metrics = dict(metrics)
    if settings.importance_cap:
        weight = _importance(tokens)
        capped = weight.clamp(max=settings.importance_cap)
        losses = losses * capped
        metrics |= {"policy/importance_avg": mean(capped), "policy/importance_capped_avg": mean(weight > capped)}
    if settings.kl_in == "loss" and settings.kl_coef > 0:
        assert tokens.logp_reference is not None, "tokens lack logp_reference"
        kl = ESTIMATORS[settings.kl_estimator](checked(prediction, tokens), tokens.logp_reference)
        losses = losses + settings.kl_coef * kl
        metrics["loss/kl_avg"] = mean(kl)
    if settings.entropy_coef > 0:
        assert prediction.entropy is not None, "the entropy bonus needs the entropy of the predictions"
        losses = losses - settings.entropy_coef * prediction.entropy
        metrics["policy/entropy_avg"] = mean(prediction.entropy)
    loss, metrics["loss/policy_avg"] = loss_mean(losses, tokens, settings.loss_mean, denominators, settings.loss_length)
    return loss, metrics


def needs_entropy(settings: PolicyGradient) -> bool:
    """The entropy bonus is on."""
    return settings.entropy_coef > 0


def clipped_value_loss(
    prediction: Prediction, tokens: TokenBatch, settings: PPO, denominators: Denominators
) -> LossAndMetrics:
    """Squared error of the value, pessimistic about leaving the neighbourhood of the value at rollout.

    Per token: max((v - target)^2, (v_clipped - target)^2) / 2 with v_clipped = clip(v, v_old - c, v_old + c), or the
    plain squared error when `value_clip` c is 0; the mean is over tokens.
    Returns (scalar, metrics per token): loss/value_avg; val/clipfrac_avg, how often the clipped term is the larger.
    """
    assert tokens.value is not None and tokens.target is not None, "tokens lack value or target"
    value = checked(prediction, tokens)
    error = (value - tokens.target).square()
    if settings.value_clip <= 0:
        return share(0.5 * error, denominators.tokens), {"loss/value_avg": mean(0.5 * error)}
    near = value.clamp(tokens.value - settings.value_clip, tokens.value + settings.value_clip)
    clipped_error = (near - tokens.target).square()
    losses = 0.5 * torch.maximum(error, clipped_error)
    metrics: dict[str, Metric] = {
        "loss/value_avg": mean(losses),
        "val/clipfrac_avg": mean(clipped_error > error),
    }
    return share(losses, denominators.tokens), metrics


def _importance(tokens: TokenBatch) -> Tensor:
    assert tokens.logp_rollout is not None, "tokens lack logp_rollout"
    return (tokens.logp_old - tokens.logp_rollout).clamp(max=_LARGEST_EXPONENT).exp()


def _ratio_metrics(difference: Tensor, ratio: Tensor) -> dict[str, Metric]:
    return {"policy/approxkl_avg": mean(0.5 * difference.square()), "val/ratio": mean(ratio)}
