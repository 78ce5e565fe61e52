"""Credit assignment: from scores, KL and values to an advantage and a value target for every sampled token.

All functions are pure, take right- or left-padded [B, T] tensors with a mask, and never read a masked position: the
mask may have holes (tokens that the policy did not sample).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megarlhf.algorithms.divergence import ESTIMATORS
from megarlhf.algorithms.state import AlgorithmState, with_observed_kl
from megarlhf.config.algorithms import PPO
from megarlhf.records import Experience

_VARIANCE_EPSILON = 1e-8


def last_valid(mask: Tensor) -> Tensor:
    """[B] int64: index of each row's last true position in mask [B, T]; -1 for a row without one."""
    position = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, position, -1).amax(dim=1)


def at_last_valid(values: Tensor, mask: Tensor) -> Tensor:
    """[B]: values [B, T] at each row's last valid position, whichever side is padded; 0 for a row without one."""
    index = last_valid(mask)
    picked = values.gather(1, index.clamp(min=0)[:, None])[:, 0]
    return torch.where(index >= 0, picked, torch.zeros_like(picked))


def shaped_reward(score: Tensor, finished: Tensor, settings: PPO) -> Tensor:
    """[B] float32: scores [B] of any dtype, clipped to +-reward_clip, then less the penalty where not finished [B]."""
    reward = score.to(torch.float32)
    if settings.reward_clip > 0:
        reward = reward.clamp(-settings.reward_clip, settings.reward_clip)
    return reward - settings.missing_eos_penalty * (~finished).to(torch.float32)


def token_rewards(kl: Tensor, reward: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """[B, T] float32: -kl_coef * kl [B, T] at valid positions, plus reward [B] at each row's last valid one.

    A row without a valid position pays its reward nowhere.
    """
    penalty = torch.where(mask, -kl_coef * kl.to(torch.float32), 0.0)
    position = torch.arange(mask.shape[1], device=mask.device)
    terminal = position == last_valid(mask)[:, None]
    return penalty + torch.where(terminal, reward.to(torch.float32)[:, None], 0.0)


def gae(reward: Tensor, value: Tensor, mask: Tensor, gamma: float, lambda_: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., 2016, equations 11, 12 and 16) over the valid positions.

    reward, value [B, T] float32: the value is the one *before* the token that earns the reward. The next value of a
    position is that of the row's next *valid* position, and 0 after the last: masked positions are no steps in time.
    Returns (advantage, target = advantage + value), both [B, T] and 0 where masked.
    """
    advantage = torch.zeros_like(reward, dtype=torch.float32)
    following = torch.zeros(reward.shape[0], dtype=torch.float32, device=reward.device)
    next_value = torch.zeros_like(following)
    for t in reversed(range(reward.shape[1])):
        valid = mask[:, t]
        delta = reward[:, t] + gamma * next_value - value[:, t]
        following = torch.where(valid, delta + gamma * lambda_ * following, following)
        next_value = torch.where(valid, value[:, t], next_value)
        advantage[:, t] = torch.where(valid, following, 0.0)
    return advantage, torch.where(mask, advantage + value, 0.0)


class Moments(NamedTuple):
    """Mean and variance of some valid tokens. The variance is the unbiased one (divided by count - 1)."""

    mean: float
    variance: float


def moments(values: Tensor, mask: Tensor) -> Moments:
    """Moments of values [B, T] where mask [B, T], summed in float64. The variance of fewer than two is 0."""
    valid = values[mask].to(torch.float64)
    if not len(valid):
        return Moments(0.0, 0.0)
    return Moments(float(valid.mean()), float(valid.var(unbiased=True)) if len(valid) > 1 else 0.0)


def standardise(values: Tensor, mask: Tensor, over: Moments, *, keep_mean: bool = False) -> Tensor:
    """[B, T] float32: (values - mean) / sqrt(variance + 1e-8), plus the mean again with `keep_mean`; 0 where masked.

    Values that are all equal become exactly 0: the subtraction is in float64, so there is no rounding to blow up.
    """
    centred = (values.to(torch.float64) - over.mean) / (over.variance + _VARIANCE_EPSILON) ** 0.5
    return torch.where(mask, centred + (over.mean if keep_mean else 0.0), 0.0).to(torch.float32)


def whiten(values: Tensor, mask: Tensor, *, keep_mean: bool = False) -> Tensor:
    """`standardise` by the values' own moments."""
    return standardise(values, mask, moments(values, mask), keep_mean=keep_mean)


def minibatch_advantages(minibatch: Experience, settings: PPO) -> Experience:
    """The minibatch as its losses should see it: advantages whitened over *its* tokens when the settings say so.

    `minibatch` holds the whole global minibatch (all data-parallel ranks), so every split of it gives the same.
    """
    if settings.whiten_advantages != "minibatch":
        return minibatch
    minibatch.require(["advantage"])
    return minibatch.replace(advantage=whiten(minibatch.advantage, minibatch.mask))


def ppo_credit(
    experience: Experience, settings: PPO, state: AlgorithmState
) -> tuple[Experience, AlgorithmState, dict[str, float]]:
    """Fill reward, token_reward, advantage and target, and say what the step's rollouts were like.

    Targets are raw advantages plus the values at rollout; whitening comes after and touches the advantages only.
    The KL coefficient is the state's; it moves for the next step. The metrics are documented at `_metrics`.
    Pure and the same on every rank that holds the same experience.
    """
    experience.require(["logp_rollout", "logp_start", "logp_reference", "value", "score"])
    mask, kl_coef = experience.mask, state.kl.coefficient
    kl = ESTIMATORS[settings.kl_estimator](experience.logp_start, experience.logp_reference)
    kl = torch.where(mask, kl, 0.0)
    reward = shaped_reward(experience.score, experience.finished, settings)
    token_reward = token_rewards(kl, reward, mask, kl_coef)
    metrics = _metrics(experience, kl, reward, kl_coef)
    if settings.whiten_rewards:
        token_reward = whiten(token_reward, mask, keep_mean=True)
    advantage, target = gae(token_reward, experience.value, mask, settings.gamma, settings.lambda_)
    if settings.whiten_advantages == "batch":
        advantage = whiten(advantage, mask)
    filled = experience.replace(reward=reward, token_reward=token_reward, advantage=advantage, target=target)
    if "objective/kl" in metrics:
        state = with_observed_kl(state, metrics["objective/kl"], experience.num_rows)
    return filled, state, metrics


def _metrics(experience: Experience, kl: Tensor, reward: Tensor, kl_coef: float) -> dict[str, float]:
    """Of the rollouts, before any whitening. Rows without a sampled token count for the scores only.

    objective/kl_coef           the coefficient that this step used
    objective/kl                mean over sequences of the summed KL, nats, by the estimator of the settings
    objective/scores            mean score as the reward gave it
    objective/non_score_reward  mean over sequences of the summed KL penalty
    objective/rlhf_reward       mean over sequences of shaped reward plus KL penalty
    val/num_eos_tokens          responses that ended by themselves
    rollout/logp_gap_max        largest |logp_rollout - logp_start|, nats
    """
    metrics = {
        "objective/kl_coef": kl_coef,
        "objective/scores": float(experience.score.mean()),
        "val/num_eos_tokens": float(experience.finished.sum()),
    }
    sampled = experience.mask.any(dim=1)
    if not bool(sampled.any()):
        return metrics
    kl_mean = float(kl.sum(dim=1)[sampled].mean())
    gap = (experience.logp_rollout - experience.logp_start)[experience.mask].abs().max()
    return metrics | {
        "objective/kl": kl_mean,
        "objective/non_score_reward": -kl_coef * kl_mean,
        "objective/rlhf_reward": float(reward[sampled].mean()) - kl_coef * kl_mean,
        "rollout/logp_gap_max": float(gap),
    }
