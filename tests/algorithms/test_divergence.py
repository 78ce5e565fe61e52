"""Claims about the KL estimators."""

import pytest
import torch

from megarlhf.algorithms.divergence import ESTIMATORS, k1, k2, k3


@pytest.mark.parametrize(
    ("difference", "expected"), [(0.5, (0.5, 0.125, 0.106531)), (-0.5, (-0.5, 0.125, 0.148721)), (0.0, (0.0, 0.0, 0.0))]
)
def test_values(difference, expected):
    logp, reference = torch.tensor([-1.0]), torch.tensor([-1.0 - difference])
    for estimator, value in zip((k1, k2, k3), expected, strict=True):
        assert abs(float(estimator(logp, reference)) - value) < 1e-6


def test_gradients():
    for estimator, slope in ((k1, 1.0), (k2, 0.5), (k3, 0.393469)):
        logp = torch.tensor(-1.0, requires_grad=True)
        estimator(logp, torch.tensor(-1.5)).backward()
        assert abs(float(logp.grad) - slope) < 1e-6


def test_their_means_over_the_policy_approach_the_exact_kl():
    """k1 and k3 are unbiased: summed over a whole small vocabulary they give KL itself."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 50, generator=generator, dtype=torch.float64).log_softmax(-1)
    exact = float((policy.exp() * (policy - reference)).sum())
    for estimator in (k1, k3):
        assert abs(float((policy.exp() * estimator(policy, reference)).sum()) - exact) < 1e-9
    assert exact > 0


def test_k2_and_k3_are_never_negative():
    difference = torch.linspace(-4, 4, 2001)
    for estimator in (k2, k3):
        assert (estimator(difference, torch.zeros(2001)) >= 0).all()


def test_every_setting_has_an_estimator():
    assert ESTIMATORS == {"k1": k1, "k2": k2, "k3": k3}
