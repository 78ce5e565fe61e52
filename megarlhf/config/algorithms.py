"""The settings of each algorithm: the `algorithm` section of a recipe.

What they mean in formulas is said where they are used, in megarlhf/algorithms. 0 turns an option off.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PolicyGradient:
    """What all algorithms have in common that sample from the policy and score the samples."""

    kl_coef: float = 0.05
    """Coefficient of the KL penalty to the reference (the starting one when the controller is adaptive)."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Where the penalty acts: taken off the reward, or added to the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL per token; k1 in the loss has a gradient that knows nothing of the reference."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """Adaptive moves the coefficient towards `kl_target`."""
    kl_target: float = 6.0
    """Target of the adaptive controller: mean over sequences of the summed KL, in nats."""
    kl_horizon: int = 10000
    """Episodes over which the adaptive controller acts."""
    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float = 0.0
    """Where the advantage A is negative the loss is at most dual_clip * -A; more than 1, or 0: off."""
    ratio: Literal["token", "sequence", "sequence_mean"] = "token"
    """Ratio new / old: of each token; of the whole response; or the response's geometric mean per token (GSPO)."""
    loss_mean: Literal["token", "sequence", "fixed_length"] = "token"
    """Mean over all tokens; over sequences of their own token means; or over sequences times `loss_length`."""
    loss_length: int = 0
    """Tokens that a sequence counts for under loss_mean fixed_length (Dr. GRPO: rollout.max_new_tokens)."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus: exact entropy per token, in nats, taken off the loss."""
    importance_cap: float | None = None
    """Truncated importance sampling between sampler and trainer: weights exp(logp_start - logp_rollout) up to this
    cap; 0: off. Not given: 2 where they compute in different precision (actor.generate_fp8), else off."""
    whiten_advantages: Literal["batch", "minibatch", "none"] = "batch"
    """Over which tokens advantages are shifted and scaled to mean 0 and variance 1."""
    normalise_scores: Literal["none", "scale", "standardise"] = "none"
    """By the moments of all scores of the run so far: divide by their deviation, or subtract their mean as well."""
    reward_clip: float = 0.0
    """Scores are clipped to [-reward_clip, reward_clip]; 0: off."""
    missing_eos_penalty: float = 0.0
    """Taken off the score of a response that did not end by itself."""
    overlong_length: int = 0
    """Length from which a response pays the whole over-long penalty; 0: off."""
    overlong_buffer: int = 0
    """Tokens below `overlong_length` over which the over-long penalty rises from 0."""
    overlong_penalty: float = 1.0
    """The whole over-long penalty."""
    num_epochs: int = 1
    """Passes over each batch."""
    num_minibatches: int = 1
    """Optimizer updates per pass."""
    target_kl: float = 0.0
    """Approximate KL(old, new) of an update beyond which the step's remaining minibatches are dropped; 0: never."""

    @property
    def needs_reference(self) -> bool:
        """Something is made of the reference's log-probs."""
        return self.kl_coef > 0


@dataclass(frozen=True)
class PPO(PolicyGradient):
    """Proximal policy optimisation with a critic and a per-token KL penalty."""

    gamma: float = 1.0
    """Discount per token."""
    lambda_: float = 0.95
    """GAE lambda per token."""
    value_clip: float = 0.2
    """Values are clipped within this distance of the values at rollout; 0 turns it off."""
    critic_warmup_steps: int = 0
    """Steps at the start in which only the critic learns; the policy, whose learning rate's schedule begins after them,
    samples and is scored as ever."""
    whiten_rewards: bool = False
    """Scale token rewards to variance 1 over the batch, keeping their mean."""
    policy_loss: Literal["clip", "penalty"] = "clip"
    """What keeps the policy near the one that sampled: clipping, or a penalty on KL(old, new) (PPO-KL)."""
    penalty_coef: float = 1.0
    """Starting coefficient beta of the penalty; it doubles and halves to hold `penalty_target`."""
    penalty_target: float = 0.01
    """Mean KL(old, new) of a step's updates, in nats per token, that the penalty aims at."""
    num_epochs: int = 4
    """Passes over each batch."""


@dataclass(frozen=True)
class GRPO(PolicyGradient):
    """Group-relative policy optimisation: the advantage is the reward relative to the prompt's other responses.

    Dr. GRPO: group_std none, loss_mean fixed_length. DAPO: clip_high 0.28, loss_mean token, kl_coef 0, over-long
    penalty. GSPO: ratio sequence_mean, loss_mean sequence, clips near 3e-4.
    """

    group_std: Literal["unbiased", "biased", "none"] = "unbiased"
    """By which deviation of the group's rewards the advantage is divided: count - 1, count, or not at all."""
    kl_coef: float = 0.04
    """Coefficient of the KL penalty to the reference; 0: no reference is needed."""
    kl_in: Literal["reward", "loss"] = "loss"
    """Where the penalty acts: taken off the reward, or added to the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL per token; k1 in the loss has a gradient that knows nothing of the reference."""
    loss_mean: Literal["token", "sequence", "fixed_length"] = "sequence"
    """Mean over all tokens; over sequences of their own token means; or over sequences times `loss_length`."""
    whiten_advantages: Literal["batch", "minibatch", "none"] = "none"
    """Over which tokens advantages are shifted and scaled to mean 0 and variance 1."""


@dataclass(frozen=True)
class RLOO(PolicyGradient):
    """REINFORCE leave-one-out: the baseline is the mean reward of the prompt's other responses."""

    divide_by_peer_std: bool = False
    """Divide the advantage by the deviation of the other responses' rewards, where it is not 0."""
    ratio: Literal["token", "sequence", "sequence_mean"] = "sequence"
    """Ratio new / old: of each token; of the whole response; or the response's geometric mean per token (GSPO)."""
    loss_mean: Literal["token", "sequence", "fixed_length"] = "sequence"
    """Mean over all tokens; over sequences of their own token means; or over sequences times `loss_length`."""
    whiten_advantages: Literal["batch", "minibatch", "none"] = "none"
    """Over which tokens advantages are shifted and scaled to mean 0 and variance 1."""


@dataclass(frozen=True)
class ReinforcePlusPlus(PolicyGradient):
    """REINFORCE++: returns to go of token rewards, whitened over the batch, with PPO's clip and without a critic."""

    baseline: bool = False
    """Subtract the mean reward of the prompt's responses (REINFORCE++-baseline)."""
    gamma: float = 1.0
    """Discount per token."""


@dataclass(frozen=True)
class DPO:
    """Direct preference optimisation from pairs, or from all pairs of K ranked answers."""

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """-log sigmoid of the margin, or IPO's squared distance of the per-token margin to 1 / (2 beta)."""
    beta: float = 0.1
    """Inverse temperature of the implied reward (IPO: its tau)."""
    label_smoothing: float = 0.0
    """Probability that a preference is the wrong way round; sigmoid loss only."""
    length_normalised: bool = False
    """Compare log-ratios per token instead of per response (IPO always does)."""
    sft_coef: float = 0.0
    """Coefficient of the chosen answer's mean negative log-prob per token."""


@dataclass(frozen=True)
class KTO:
    """Kahneman-Tversky optimisation from answers that were judged alone, as desirable or not."""

    beta: float = 0.1
    """Inverse temperature of the implied reward."""
    desirable_weight: float = 1.0
    """Weight of desirable answers."""
    undesirable_weight: float = 1.0
    """Weight of undesirable answers."""
    reference_point: Literal["mismatched", "zero"] = "mismatched"
    """What implied rewards are compared with: the KL to the reference, measured on mismatched prompts and answers of
    the batch, or 0."""


@dataclass(frozen=True)
class SFT:
    """Supervised fine-tuning: the mean negative log-prob of the marked tokens."""

    loss_mean: Literal["token", "sequence"] = "token"
    """Mean over all marked tokens, or over sequences of their own token means."""


@dataclass(frozen=True)
class RewardModelling:
    """A reward model from preferences (pairs or K ranked answers) or from scores given by hand."""

    loss: Literal["preference", "regression"] = "preference"
    """Bradley-Terry over all pairs of a prompt's answers, or the squared error to each answer's score or scores."""
    read_at: Literal["last", "divergence"] = "last"
    """Where scores are read: at each answer's last token, or at every token from where the answers to a prompt first
    differ (DeepSpeed-Chat's per-token form)."""
    label_smoothing: float = 0.0
    """Probability that a preference is the wrong way round."""
    margins: bool = False
    """The better answer must win by the margin that the data give it."""
    centring_coef: float = 0.0
    """Coefficient of the squared sum of a pair's scores, which keeps scores centred at 0."""
    attributes: tuple[str, ...] = ()
    """Regression on several scores of an answer (helpfulness, correctness, ...): their names, which become the labels
    of the exported model, in this order. Empty: one score."""
