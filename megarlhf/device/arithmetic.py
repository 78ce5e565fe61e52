"""Arithmetic that GPUs and CPUs offer under different names."""

import torch

_ONEDNN_PRODUCTS = 2**26
"""Multiplications from which one product by oneDNN saves a tenth of a millisecond."""


def add_matmul_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total [n, m] float32 += [n, k] x [k, m], in place; a product of low precision is rounded to it before it is added
    on a CPU, where torch multiplies low precision without converting only into the same."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda:
        total += torch.mm(left, right, out_dtype=torch.float32)
    else:
        total += left @ right


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., k] times the transpose of weight [m, k], by rows or by columns in memory -> [..., m], plus bias [m].

    On x86, oneDNN's float32 products are 5 to 15 % quicker than torch's (MKL's); but they are compiled for each number
    of rows, in a millisecond, so small ones are left to torch. Not differentiable.
    """
    if _is_for_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight.detach(), bias, "none", [], "")
    return torch.nn.functional.linear(x, weight, bias)


def linear_float32(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [n, k] times the transpose of weight [m, k] -> [n, m] float32, accumulated in float32 whatever the inputs'
    precision. `out` is memory that may be used for the result.

    A plain bfloat16 product would round each result to 8 bits: an error of 0.03 nats on a logit of 10. Not
    differentiable; callers are inside their own autograd functions.
    """
    if x.is_cuda and x.dtype != torch.float32:
        product = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return product if out is None else out.copy_(product)
    x, weight = x.float(), weight.float()
    return linear(x, weight) if _is_for_onednn(x, weight) else torch.mm(x, weight.t(), out=out)


def _is_for_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    is_large = x.numel() * len(weight) >= _ONEDNN_PRODUCTS
    is_dense = weight.is_contiguous() or weight.t().is_contiguous()  # else a thousand times as slow
    return is_large and is_dense and x.dtype == torch.float32 and not x.is_cuda and torch.backends.mkldnn.is_available()


def block_bytes(tensor: torch.Tensor) -> int:
    """How large a block of numbers should be that several kernels work on one after the other, where `tensor` lives.

    A CPU's kernels, its products too, are quickest while it stays in the caches; on a GPU each launch has to be worth
    its while.
    """
    return 512 * 2**20 if tensor.is_cuda else 2 * 2**20
