"""What a layer does to numbers one by one, as one function to autograd each: gated activation, rotation, RMS norm.

Left to autograd operation by operation, their backward passes join halves that were cut, keep what can be had again,
and write memory several times for each number. The closed forms here keep a layer's input only.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Slope = Callable[[Tensor, Tensor, Tensor], None]
"""(gradient of an activation's output, its input, out): writes the gradient of the input."""


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation (arXiv:1606.08415)."""
    return F.gelu(x, approximate="tanh")


def _silu_slope(slope: Tensor, x: Tensor, out: Tensor) -> None:
    torch.ops.aten.silu_backward(slope, x, grad_input=out)


def _gelu_tanh_slope(slope: Tensor, x: Tensor, out: Tensor) -> None:
    torch.ops.aten.gelu_backward(slope, x, approximate="tanh", grad_input=out)


_SLOPES: dict[Callable[[Tensor], Tensor], Slope] = {F.silu: _silu_slope, gelu_tanh: _gelu_tanh_slope}


def gated(both: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """activation(gate) * up of `both` [.., 2F], gate then up -> [.., F]. `activation` is silu or `gelu_tanh`."""
    # a function of autograd costs a decoding step as much as the multiplication
    return _Gated.apply(both, activation) if torch.is_grad_enabled() else _gated(both, activation)


def _gated(both: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = both.chunk(2, -1)
    return activation(gate).mul_(up)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(both)
        ctx.activation = activation
        return _gated(both, activation)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (both,) = ctx.saved_tensors
        found = torch.empty_like(both)
        (gate, up), (to_gate, to_up) = both.chunk(2, -1), found.chunk(2, -1)
        torch.mul(slope, ctx.activation(gate), out=to_up)
        _SLOPES[ctx.activation](slope * up, gate, to_gate)
        return found, None


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first R numbers of heads [.., D] by angles whose cosine and sine are [.., R/2], in the heads' dtype.

    RoFormer (arXiv:2104.09864), equation 34, in halves, not pairs: number i and number i + R/2 turn together.
    """
    return _Rotated.apply(heads, cos, sin)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(slope, cos, -sin), None, None


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    first, second, rest = heads.split([half, half, heads.shape[-1] - 2 * half], -1)
    torch.mul(first, cos, out=out[..., :half]).sub_(second * sin)
    torch.mul(second, cos, out=out[..., half : 2 * half]).add_(first * sin)
    if rest.shape[-1]:
        out[..., 2 * half :] = rest
    return out


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension [H]; computed in float32, the result as x.

    With n = x / sqrt(..) and a gradient g of n (that of the result times weight), x gets (g - n mean(g n)) / sqrt(..).
    """
    return _RMSNorm.apply(x, weight, epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        inverse = x.float().square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x.float() * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        normed, slope = x.float() * inverse, slope.float()
        product = slope * normed
        to_weight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        mean = product.mul_(weight).mean(-1, keepdim=True)
        to_x = (slope * weight).addcmul_(normed, mean, value=-1.0).mul_(inverse).to(x.dtype)
        return to_x, to_weight, None
