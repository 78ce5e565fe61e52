"""The gradient's norm is right to float32's precision where torch's own is not."""

from types import SimpleNamespace

import pytest
import torch

from megarlhf.engines.gradient_norm import gradient_norm


def test_the_norm_of_a_large_gradient_is_accurate(world):
    gradients = [1e-3 * torch.randn(5000, 2000, generator=torch.Generator().manual_seed(0)), torch.ones(3)]
    optimizer = SimpleNamespace(get_main_grads_for_grad_norm=lambda: gradients)
    exact = sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5
    found = gradient_norm(SimpleNamespace(chained_optimizers=[optimizer]), world)
    assert found == pytest.approx(exact, rel=1e-6)
