"""Per-token estimators of KL(policy || reference) from the log-probs of sampled tokens.

With d = logp - logp_reference (nats): k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman, "Approximating KL
divergence", 2020). k1 and k3 are unbiased, k2 and k3 are never negative. As a penalty taken off the reward each may
serve. As a loss, k1 would not: its gradient in logp is 1 whatever the reference is.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Estimator = Callable[[Tensor, Tensor], Tensor]


def k1(logp: Tensor, logp_reference: Tensor) -> Tensor:
    """d, for tensors of any one shape."""
    return logp - logp_reference


def k2(logp: Tensor, logp_reference: Tensor) -> Tensor:
    """d^2 / 2; gradient d."""
    return 0.5 * (logp - logp_reference).square()


def k3(logp: Tensor, logp_reference: Tensor) -> Tensor:
    """exp(-d) - 1 + d; gradient 1 - exp(-d). expm1 keeps it exact where d is small."""
    difference = logp - logp_reference
    return torch.expm1(-difference) + difference


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3}
"""By the name used in the settings (`kl_estimator`)."""
