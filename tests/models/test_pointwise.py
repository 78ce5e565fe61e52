"""Steps of a layer that are one function to autograd: values and gradients of the plain operations."""

import pytest
import torch
import torch.nn.functional as F

from megarlhf.models.pointwise import gated, gelu_tanh, rms_norm, rotated


def plain_gated(both, activation):
    gate, up = both.chunk(2, -1)
    return activation(gate) * up


def plain_rotated(heads, cos, sin):
    """As transformers writes it, for the first numbers of a head."""
    turned, rest = heads[..., : 2 * cos.shape[-1]], heads[..., 2 * cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)


def plain_norm(x, weight, epsilon):
    return F.rms_norm(x, weight.shape, weight, epsilon)


ANGLES = torch.linspace(-9, 9, 7 * 3).view(7, 1, 1, 3)
CASES = {
    "silu": (gated, plain_gated, [(7, 1, 10)], (F.silu,)),
    "gelu": (gated, plain_gated, [(7, 10)], (gelu_tanh,)),
    "rotation of a whole head": (rotated, plain_rotated, [(7, 1, 4, 6)], (ANGLES.cos(), ANGLES.sin())),
    "rotation of a part": (rotated, plain_rotated, [(7, 1, 4, 11)], (ANGLES.cos(), ANGLES.sin())),
    "norm": (rms_norm, plain_norm, [(7, 2, 12), (12,)], (1e-5,)),
}


def with_gradients(function, inputs, rest, slope):
    inputs = [each.clone().requires_grad_() for each in inputs]
    result = function(*inputs, *rest)
    (result * slope).sum().backward()
    return [result, *(each.grad for each in inputs)]


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_plain_operations(case, dtype, tolerance):
    ours, plain, shapes, rest = CASES[case]
    random = torch.Generator().manual_seed(5)
    inputs = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
    rest = tuple(each.to(dtype) if isinstance(each, torch.Tensor) else each for each in rest)
    slope = torch.randn(plain(*inputs, *rest).shape, generator=random).to(dtype)
    found = with_gradients(ours, inputs, rest, slope)
    expected = with_gradients(plain, inputs, rest, slope)
    assert torch.equal(found[0], expected[0])
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype and torch.allclose(
            one, other, rtol=0, atol=tolerance * float(other.detach().abs().max())
        )


@pytest.mark.parametrize("case", [name for name in CASES if name != "norm"])  # which is float32, whatever it is given
def test_gradients_are_the_derivatives(case):
    function, _, shapes, rest = CASES[case]
    random = torch.Generator().manual_seed(6)
    inputs = [torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes]
    rest = [each.double() if isinstance(each, torch.Tensor) else each for each in rest]
    assert torch.autograd.gradcheck(lambda *given: function(*given, *rest), inputs)
