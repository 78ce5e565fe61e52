"""The gradient's norm is right to float32's precision where torch's own is not."""

from types import SimpleNamespace

import pytest
import torch

from megarlhf.engines.gradient_norm import gradient_norm
from megarlhf.engines.gradients import clip_gradients


def test_the_norm_of_a_large_gradient_is_accurate(world):
    gradients = [1e-3 * torch.randn(5000, 2000, generator=torch.Generator().manual_seed(0)), torch.ones(3)]
    optimizer = SimpleNamespace(get_main_grads_for_grad_norm=lambda: gradients)
    exact = sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5
    found = gradient_norm(SimpleNamespace(chained_optimizers=[optimizer]), world)
    assert found == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("max_norm", [0.5, 50.0])
def test_clipping_is_torchs(max_norm):
    ours, torchs = ([torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(5))] for _ in range(2))
    for parameters in (ours, torchs):
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    norm = float(torch.nn.utils.clip_grad_norm_(torchs, max_norm))
    clip_gradients([*ours, torch.nn.Parameter(torch.ones(2))], max_norm, norm)
    for parameter, expected in zip(ours, torchs, strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
