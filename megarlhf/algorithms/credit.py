"""Credit assignment: from rewards and penalties to an advantage (and a value target) for every sampled token.

All functions are pure, take right- or left-padded [B, T] tensors with a mask, and never read a masked position: the
mask may have holes (tokens that the policy did not sample). The metrics are those of `shaping.earnings`.
"""

import torch
from torch import Tensor

from megarlhf.algorithms.groups import centred, group_relative, leave_one_out
from megarlhf.algorithms.moments import spread, whiten
from megarlhf.algorithms.shaping import earnings, token_rewards
from megarlhf.algorithms.state import AlgorithmState
from megarlhf.config.algorithms import GRPO, PPO, RLOO, PolicyGradient, ReinforcePlusPlus
from megarlhf.records import Experience
from megarlhf.records.experience import scatter_flat, valid_counts, valid_values
from megarlhf.records.shards import WHOLE, Shard

_ROWS_AT_ONCE = 4096
"""Whose numbers of one position fit a core's cache: a pass over time goes from position to position."""

Credited = tuple[Experience, AlgorithmState, dict[str, float]]


def policy_reads(settings: PolicyGradient) -> tuple[str, ...]:
    """Fields that every algorithm with samples needs; the reference only where something is made of it, and with it
    what the policy said before the update (which the losses read too, but may take from elsewhere)."""
    compared = ("logp_start", "logp_reference") if settings.needs_reference else ()
    return ("logp_rollout", *compared, "score")


def ppo_reads(settings: PPO) -> tuple[str, ...]:
    """The same, and the critic's values."""
    return (*policy_reads(settings), "value")


def gae(reward: Tensor, value: Tensor, mask: Tensor, gamma: float, lambda_: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., 2016, equations 11, 12 and 16) over the valid positions.

    reward, value [B, T] float32: the value is the one *before* the token that earns the reward. The next value of a
    position is that of the row's next *valid* position, and 0 after the last: masked positions are no steps in time.
    Returns (advantage, target = advantage + value), both [B, T] and 0 where masked.
    """
    # Rows of their valid positions alone, so that the next column is the next step in time.
    counts = valid_counts(mask)
    is_step = torch.arange(int(counts.max()) if len(counts) else 0) < counts[:, None]
    rewards, values = (scatter_flat(valid_values(part, mask), is_step) for part in (reward, value))
    delta = rewards + gamma * torch.nn.functional.pad(values[:, 1:], (0, 1)) - values
    for rows in delta.split(_ROWS_AT_ONCE):
        _sum_backwards(rows, gamma * lambda_)
    advantage = valid_values(delta, is_step)
    return scatter_flat(advantage, mask), scatter_flat(advantage + valid_values(value, mask), mask)


def _sum_backwards(delta: Tensor, factor: float) -> None:
    """Adds to each column of [B, T] the next one, of which this is true already, times `factor`."""
    by_time = delta.T.contiguous()
    following, scaled = torch.zeros(len(delta)), torch.empty(len(delta))
    for step in reversed(by_time.unbind()):
        following = step.add_(torch.mul(following, factor, out=scaled))
    delta.copy_(by_time.T.contiguous())


def returns_to_go(reward: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """[B, T] float32: sum over the row's later valid positions (this one included) of gamma^distance * reward."""
    return gae(reward, torch.zeros_like(reward), mask, gamma, 1.0)[0]


def minibatch_advantages(minibatch: Experience, settings: PolicyGradient, shard: Shard = WHOLE) -> Experience:
    """The minibatch as its losses should see it: advantages whitened over *its* tokens when the settings say so.

    `minibatch` holds the whole global minibatch (all data-parallel ranks), or a shard of it, so every split of it gives
    the same. Collective over the shards.
    """
    if settings.whiten_advantages != "minibatch":
        return minibatch
    minibatch.require(["advantage"])
    return minibatch.replace(advantage=whiten(minibatch.advantage, minibatch.mask, shard))


def ppo_credit(experience: Experience, settings: PPO, state: AlgorithmState, shard: Shard = WHOLE) -> Credited:
    """Fill reward, token_reward, advantage and target by GAE.

    Targets are raw advantages plus the values at rollout; whitening comes after and touches the advantages only.
    The same on every rank that holds the same experience, a shard of the batch or all of it.
    """
    experience.require(ppo_reads(settings))
    mask, earned = experience.mask, earnings(experience, settings, state, shard)
    token_reward = token_rewards(earned.penalty, earned.reward, mask)
    if settings.whiten_rewards:
        token_reward = whiten(token_reward, mask, shard, keep_mean=True)
    advantage, target = gae(token_reward, experience.value, mask, settings.gamma, settings.lambda_)
    filled = experience.replace(
        reward=earned.reward,
        token_reward=token_reward,
        advantage=_batch_whitened(advantage, mask, settings, shard),
        target=target,
    )
    return filled, earned.state, earned.metrics | _explained_variance(target, experience.value, mask, shard)


def _explained_variance(target: Tensor, value: Tensor, mask: Tensor, shard: Shard) -> dict[str, float]:
    """`val/explained_variance`: 1 - var(target - value) / var(target) over the batch's tokens; 1 is a perfect critic, 0
    one that is no better than a constant. Absent where the targets do not vary."""
    wanted, predicted = valid_values(target, mask).double(), valid_values(value, mask).double()
    varies = spread(wanted, shard).squares
    return {"val/explained_variance": 1 - spread(wanted - predicted, shard).squares / varies} if varies else {}


def grpo_credit(experience: Experience, settings: GRPO, state: AlgorithmState, shard: Shard = WHOLE) -> Credited:
    """Fill reward and advantage: every token gets its response's `group_relative` reward (KL penalties summed in)."""
    experience.require(policy_reads(settings))
    earned = earnings(experience, settings, state, shard)
    total, sampled = earned.reward + earned.penalty.sum(dim=1), experience.mask.any(dim=1)
    relative = group_relative(total, experience.group, sampled, settings.group_std)
    return _of_rows(experience, settings, earned.reward, relative, shard), earned.state, earned.metrics


def rloo_credit(experience: Experience, settings: RLOO, state: AlgorithmState, shard: Shard = WHOLE) -> Credited:
    """Fill reward and advantage: every token gets its response's reward less the `leave_one_out` baseline."""
    experience.require(policy_reads(settings))
    earned = earnings(experience, settings, state, shard)
    total, sampled = earned.reward + earned.penalty.sum(dim=1), experience.mask.any(dim=1)
    relative = leave_one_out(total, experience.group, sampled, divide_by_peer_std=settings.divide_by_peer_std)
    return _of_rows(experience, settings, earned.reward, relative, shard), earned.state, earned.metrics


def reinforce_plus_plus_credit(
    experience: Experience, settings: ReinforcePlusPlus, state: AlgorithmState, shard: Shard = WHOLE
) -> Credited:
    """Fill reward, token_reward and advantage: discounted returns to go, whitened over the batch's tokens.

    Hu, "REINFORCE++", 2025, equations 5 to 7: A_t = r - beta * sum of the KL from t on, then (A - mean) / std over the
    global batch. The baseline form first takes the mean reward of the response's group off r.
    """
    experience.require(policy_reads(settings))
    mask, earned = experience.mask, earnings(experience, settings, state, shard)
    reward = earned.reward
    if settings.baseline:
        reward = centred(reward, experience.group, mask.any(dim=1)).to(torch.float32)
    token_reward = token_rewards(earned.penalty, reward, mask)
    advantage = _batch_whitened(returns_to_go(token_reward, mask, settings.gamma), mask, settings, shard)
    filled = experience.replace(reward=earned.reward, token_reward=token_reward, advantage=advantage)
    return filled, earned.state, earned.metrics


def _batch_whitened(advantage: Tensor, mask: Tensor, settings: PolicyGradient, shard: Shard) -> Tensor:
    return whiten(advantage, mask, shard) if settings.whiten_advantages == "batch" else advantage


def _of_rows(
    experience: Experience, settings: PolicyGradient, reward: Tensor, relative: Tensor, shard: Shard
) -> Experience:
    advantage = torch.where(experience.mask, relative[:, None], 0.0)
    return experience.replace(reward=reward, advantage=_batch_whitened(advantage, experience.mask, settings, shard))
