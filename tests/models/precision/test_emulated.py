"""The emulated linear: its error, its three products against slow ones, and the copy of the weight that it keeps."""

import pytest
import torch

from megarlhf.config.precision import FP8
from megarlhf.models.precision.emulated import State, fp8_linear
from megarlhf.models.precision.quantise import E4M3, E5M2, per_32, per_block, per_tensor

RECIPES = ("tensorwise", "blockwise", "mxfp8", "delayed")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).norm() / right.norm())


def products(state: State, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = fp8_linear(x, weight, None, state)
    y.backward(gradient)
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("format, backward_error", [("e4m3", 0.037), ("hybrid", 0.059)])
def test_error_is_that_of_two_rounded_operands(recipe, format, backward_error):
    x, weight, gradient = normal(256, 512), normal(384, 512, seed=1), normal(256, 384, seed=2)
    y, to_x, to_weight = products(State(FP8(recipe, format)), x, weight, gradient)
    # Powers of two waste up to half a binade, never precision of normal numbers: within a tenth of the Gaussian figure.
    assert relative(y, x @ weight.t()) == pytest.approx(0.037, rel=0.1)
    assert relative(to_x, gradient @ weight) == pytest.approx(backward_error, rel=0.1)
    assert relative(to_weight, gradient.t() @ x) == pytest.approx(backward_error, rel=0.1)


def test_each_product_reads_blocks_along_the_axis_that_it_sums_over():
    x, weight, gradient = normal(200, 300), normal(150, 300, seed=1), normal(200, 150, seed=2)
    y, to_x, to_weight = products(State(FP8("blockwise", "hybrid")), x, weight, gradient)
    w = per_block(weight, E4M3, 128).dequantised()
    assert torch.equal(y, per_block(x, E4M3, 1).dequantised() @ w.t())
    assert torch.equal(to_x, per_block(gradient, E5M2, 1).dequantised() @ w)
    across_tokens = per_block(gradient.t().contiguous(), E5M2, 1).dequantised()
    assert torch.equal(to_weight, across_tokens @ per_block(x.t().contiguous(), E4M3, 1).dequantised().t())


def test_mxfp8_quantises_the_weight_both_ways():
    x, weight, gradient = normal(40, 70), normal(33, 70, seed=1), normal(40, 33, seed=2)
    _, to_x, _ = products(State(FP8("mxfp8")), x, weight, gradient)
    down_the_rows = per_32(weight.t().contiguous(), E4M3).dequantised().t()
    assert torch.equal(to_x, per_32(gradient, E4M3).dequantised() @ down_the_rows)


def test_a_bias_is_added_after_the_product_and_shapes_are_torchs():
    x, weight, bias = normal(2, 3, 64), normal(5, 64, seed=1), normal(5, seed=2)
    with_bias = fp8_linear(x, weight, bias, State(FP8("tensorwise")))
    assert with_bias.shape == (2, 3, 5)
    assert torch.equal(with_bias, fp8_linear(x, weight, None, State(FP8("tensorwise"))) + bias)


def test_bfloat16_in_bfloat16_out():
    x, weight = normal(8, 64).bfloat16().requires_grad_(), normal(4, 64, seed=1).bfloat16().requires_grad_()
    y = fp8_linear(x, weight, None, State(FP8("blockwise")))
    y.sum().backward()
    assert y.dtype == x.grad.dtype == weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_kept_weight_is_stale_until_it_is_forgotten(recipe):
    """Transformer Engine's trap: without telling the layer, halving the weight changes nothing."""
    state, x, weight = State(FP8(recipe)), normal(8, 64), normal(4, 64, seed=1)
    before = fp8_linear(x, weight, None, state)
    weight.mul_(0.5)
    assert torch.equal(fp8_linear(x, weight, None, state), before)
    state.kept = None
    assert relative(fp8_linear(x, weight, None, state), before / 2) < 0.1


def test_delayed_scaling_goes_by_the_steps_before():
    state, weight = State(FP8("delayed", amax_history=2)), normal(4, 64, seed=1)
    settings = state.settings
    for magnitude, expected in ((1.0, 1.0), (8.0, 448.0), (2.0, 56.0), (2.0, 56.0), (2.0, 224.0)):
        assert state.histories.input.scale == pytest.approx(expected)
        fp8_linear(torch.full((2, 64), magnitude), weight, None, state)
        state.histories.advance(settings, None)


def test_a_scoring_pass_disturbs_delayed_scales_and_so_the_next_step():
    """Why delayed scaling is refused where scoring and training alternate."""
    state, weight = State(FP8("delayed", amax_history=1)), normal(4, 64, seed=1)
    fp8_linear(normal(8, 64), weight, None, state)
    state.histories.advance(state.settings, None)
    undisturbed = state.histories.input.scale
    with torch.no_grad():
        fp8_linear(100 * normal(8, 64), weight, None, state)
    state.histories.advance(state.settings, None)
    assert state.histories.input.scale < undisturbed / 50


def test_outlier_channels_cost_a_tensor_more_than_blocks():
    x = normal(64, 512)
    x[:, 0] *= 1e5
    assert relative(per_tensor(x, E4M3).dequantised()[:, 128:], x[:, 128:]) > 5 * relative(
        per_block(x, E4M3, 1).dequantised()[:, 128:], x[:, 128:]
    )
