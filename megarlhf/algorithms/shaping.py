"""What a response earns: its score, normalised, clipped and less penalties; and the KL penalty of each token.

All functions take padded [B, T] tensors with a mask on either side, and never read a masked position.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megarlhf.algorithms.divergence import ESTIMATORS
from megarlhf.algorithms.groups import has_signal
from megarlhf.algorithms.state import AlgorithmState, with_observed_kl, with_seen_scores
from megarlhf.config.algorithms import PolicyGradient
from megarlhf.records import Experience
from megarlhf.records.experience import last_valid, valid_counts, valid_values
from megarlhf.records.shards import WHOLE, Shard


class Earnings(NamedTuple):
    """What the rows of a batch earned, and the state after seeing them."""

    reward: Tensor
    """[B] float32: the shaped score."""
    penalty: Tensor
    """[B, T] float32: -coefficient * KL where the penalty is in the reward, else 0; 0 where masked."""
    state: AlgorithmState
    metrics: dict[str, float]


def at_last_valid(values: Tensor, mask: Tensor) -> Tensor:
    """[B]: values [B, T] at each row's last valid position, whichever side is padded; 0 for a row without one."""
    index = last_valid(mask)
    picked = values.gather(1, index.clamp(min=0)[:, None])[:, 0]
    return torch.where(index >= 0, picked, torch.zeros_like(picked))


def overlong_penalty(lengths: Tensor, settings: PolicyGradient) -> Tensor:
    """[B] float32, at most 0: DAPO's soft over-long punishment (Yu et al., 2025, equation 13) of sampled tokens [B].

    With Lmax = overlong_length and C = overlong_buffer: 0 up to Lmax - C, then ((Lmax - C) - L) / C, and -1 above
    Lmax; times overlong_penalty.
    """
    if settings.overlong_length <= 0:
        return torch.zeros(lengths.shape, dtype=torch.float32)
    longest, buffer = settings.overlong_length, settings.overlong_buffer
    inside = (longest - buffer - lengths.to(torch.float32)) / max(buffer, 1)
    return settings.overlong_penalty * torch.where(lengths > longest, -1.0, inside.clamp(max=0.0))


def shaped_reward(score: Tensor, finished: Tensor, lengths: Tensor, settings: PolicyGradient) -> Tensor:
    """[B] float32: scores [B] of any dtype, clipped to +-reward_clip, then less the penalties: for a response that
    is not finished [B], and for its sampled tokens, lengths [B]."""
    reward = score.to(torch.float32)
    if settings.reward_clip > 0:
        reward = reward.clamp(-settings.reward_clip, settings.reward_clip)
    reward = reward - settings.missing_eos_penalty * (~finished).to(torch.float32)
    return reward + overlong_penalty(lengths, settings)


def token_rewards(penalty: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """[B, T] float32: penalty [B, T] at valid positions, plus reward [B] at each row's last valid one.

    A row without a valid position is paid nowhere.
    """
    paid, last = torch.where(mask, penalty.to(torch.float32), 0.0), last_valid(mask)
    rows = (last >= 0).nonzero()[:, 0]
    paid[rows, last[rows]] += reward.to(torch.float32)[rows]
    return paid


def earnings(experience: Experience, settings: PolicyGradient, state: AlgorithmState, shard: Shard = WHOLE) -> Earnings:
    """Shaped rewards and KL penalties under `state`, which then takes in this batch's scores and KL.

    The batch may be a shard of the step's: state and metrics are of all of it. Collective over the shards.

    objective/kl_coef           the coefficient that this step used
    objective/kl                mean over sequences of the summed KL, nats, by the estimator of the settings
    objective/scores            mean score as the reward gave it
    objective/non_score_reward  mean over sequences of the summed KL penalty
    objective/rlhf_reward       mean over sequences of shaped reward plus KL penalty
    objective/score_deviation   deviation of all scores so far, where scores are normalised
    val/num_eos_tokens          responses that ended by themselves
    rollout/logp_gap_max        largest |logp_rollout - logp_start|, nats, where logp_start is filled
    rollout/length_avg          mean tokens of a response
    objective/groups_without_signal  share of the groups of several responses whose rewards are all equal

    KL is reported where there is a reference. Rows without a sampled token count for the scores only.
    """
    mask, coefficient = experience.mask, state.kl.coefficient
    lengths = valid_counts(mask)
    sampled = lengths > 0
    score, state = normalised_scores(experience.score, sampled, settings, state, shard)
    reward = shaped_reward(score, experience.finished, lengths, settings)
    kl = _kl(experience, settings)
    penalty = -coefficient * kl if settings.kl_in == "reward" else torch.zeros_like(kl)
    counted = (torch.ones(len(mask)), sampled, experience.score, experience.finished)
    num_rows, num_sampled, scores, num_finished = shard.sum(_sums(counted)).tolist()
    metrics = {
        "objective/kl_coef": coefficient,
        "objective/scores": scores / num_rows,
        "val/num_eos_tokens": num_finished,
    }
    if settings.normalise_scores != "none":
        metrics["objective/score_deviation"] = state.scores.deviation
    if num_sampled:
        metrics |= _metrics(experience, kl, penalty, reward, shard)
    if "objective/kl" in metrics:
        state = with_observed_kl(state, metrics["objective/kl"], int(num_rows))
    return Earnings(reward, penalty, state, metrics)


def normalised_scores(
    score: Tensor, sampled: Tensor, settings: PolicyGradient, state: AlgorithmState, shard: Shard = WHOLE
) -> tuple[Tensor, AlgorithmState]:
    """Scores [B] float32 by the moments of all scores of the run, the sampled rows [B] of this batch's shards included.

    "scale": score / deviation; "standardise": (score - mean) / deviation. A deviation of 0 divides by 1.
    """
    score = score.to(torch.float32)
    if settings.normalise_scores == "none":
        return score, state
    state = with_seen_scores(state, score[sampled], shard)
    mean = state.scores.mean if settings.normalise_scores == "standardise" else 0.0
    return ((score.to(torch.float64) - mean) / state.scores.deviation).to(torch.float32), state


def _kl(experience: Experience, settings: PolicyGradient) -> Tensor:
    if experience.logp_reference is None:
        return torch.zeros(experience.mask.shape, dtype=torch.float32)
    kl = ESTIMATORS[settings.kl_estimator](experience.logp_start, experience.logp_reference)
    return torch.where(experience.mask, kl, 0.0)


def _metrics(experience: Experience, kl: Tensor, penalty: Tensor, reward: Tensor, shard: Shard) -> dict[str, float]:
    mask, lengths = experience.mask, valid_counts(experience.mask)
    sampled = lengths > 0
    parts = (sampled, reward, lengths, penalty.sum(dim=1), kl.sum(dim=1))
    count, *sums = shard.sum(_sums(part[sampled] for part in parts)).tolist()
    mean_reward, mean_length, mean_penalty, mean_kl = (part / count for part in sums)
    metrics = {"objective/rlhf_reward": mean_reward + mean_penalty, "rollout/length_avg": mean_length}
    if experience.logp_start is not None:
        gap = valid_values(experience.logp_rollout - experience.logp_start, mask).abs()
        metrics["rollout/logp_gap_max"] = float(shard.largest(torch.cat([torch.zeros(1), gap]).amax()))
    if experience.logp_reference is not None:
        metrics["objective/kl"] = mean_kl
        metrics["objective/non_score_reward"] = mean_penalty
    return metrics | _signal(reward, experience.group, sampled, shard)


def _signal(reward: Tensor, group: Tensor, sampled: Tensor, shard: Shard) -> dict[str, float]:
    groups, index, sizes = group[sampled].unique(return_inverse=True, return_counts=True)
    informative = torch.zeros(len(groups), dtype=torch.bool)
    informative[index] = has_signal(reward[sampled], group[sampled], torch.ones_like(index, dtype=torch.bool))
    several = sizes > 1
    count, idle = shard.sum(torch.stack([several.sum(), (several & ~informative).sum()])).tolist()
    return {"objective/groups_without_signal": idle / count} if count else {}


def _sums(values: Iterable[Tensor]) -> Tensor:
    """The sum of each, in float64."""
    return torch.stack([one.double().sum() for one in values])
