"""The settings of each algorithm: the `algorithm` section of a recipe.

What they mean in formulas is said where they are used, in megarlhf/algorithms.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PPO:
    """Proximal policy optimisation with a critic and a per-token KL penalty."""

    gamma: float = 1.0
    """Discount per token."""
    lambda_: float = 0.95
    """GAE lambda per token."""
    kl_coef: float = 0.05
    """Coefficient of the per-token KL penalty (the starting one when the controller is adaptive)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the per-token KL that is taken off the reward."""
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
    value_clip: float = 0.2
    """Values are clipped within this distance of the values at rollout; 0 turns it off."""
    whiten_advantages: Literal["batch", "minibatch", "none"] = "batch"
    """Over which tokens advantages are shifted and scaled to mean 0 and variance 1."""
    whiten_rewards: bool = False
    """Scale token rewards to variance 1 over the batch, keeping their mean."""
    reward_clip: float = 0.0
    """Scores are clipped to [-reward_clip, reward_clip]; 0 turns it off."""
    missing_eos_penalty: float = 0.0
    """Taken off the score of a response that did not end by itself."""
    num_epochs: int = 4
    """Passes over each batch."""
    num_minibatches: int = 1
    """Optimizer updates per pass."""
    target_kl: float = 0.0
    """Approximate KL(old, new) of an update beyond which the step's remaining minibatches are dropped; 0: never."""
