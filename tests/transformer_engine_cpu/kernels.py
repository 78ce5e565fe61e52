"""What stands in for `transformer_engine_torch`, Transformer Engine's compiled half: its names, and kernels in torch.

Transformer Engine's own Python decides what is quantised when, kept, gathered and multiplied; these functions do the
arithmetic it asks for, written from the definitions in its documentation and in the layouts its tensor classes read.
They import nothing of megarlhf: what is compared with them is not what they are made of. A kernel that is not here is
a name whose call raises.

Letters: M rows (all leading dimensions), K columns.
"""

import enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.transformer_engine_cpu.layouts import (
    block_scales,
    from_block_scales,
    from_mx_scales,
    mx_scales,
    per_tensor_scale,
    saturating,
    spread,
)

DType = enum.IntEnum("DType", "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1", start=0)
FP8FwdTensors = enum.IntEnum(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    start=0,
)
FP8BwdTensors = enum.IntEnum(
    "FP8BwdTensors", "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3", start=0
)
NVTE_Fused_Attn_Backend = enum.IntEnum(
    "NVTE_Fused_Attn_Backend", "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8", start=0
)
_TORCH = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}


def _torch(dtype: Any) -> torch.dtype:
    """The torch type of a DType, of theirs or of ours."""
    return dtype if isinstance(dtype, torch.dtype) else _TORCH[DType(int(dtype))]


# --- quantising ---------------------------------------------------------------------------------------------------


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """`tensor` as the kind of quantised tensor that `quantizer` makes, written into `output` where one is given.

    Communicates where per-tensor scaling reduces its largest magnitude over a group.
    """
    if noop is not None and bool(noop.item()):
        return output
    found = _QUANTISE[type(quantizer).__name__](tensor.detach(), quantizer)
    if output is None:
        return _made(quantizer, tuple(tensor.shape), tensor.dtype, found)
    for name, value in found.items():
        setattr(output, name, value)
    if "_transpose" in found:
        output._transpose_invalid = found.get("_transpose") is None
    return output


def bgrad_quantize(gradient: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """The gradient of a bias, and the gradient of the output quantised."""
    return gradient.flatten(0, -2).float().sum(0).to(gradient.dtype), quantize(gradient, quantizer)


def dequantize(tensor: Any, dtype: Any) -> Tensor:
    """The numbers that a quantised tensor stands for."""
    return _over_columns(tensor, _torch(dtype)) if _has_rows(tensor) else _over_rows(tensor, _torch(dtype))


def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: torch.device, pinned: bool = False
) -> Any:
    """A quantised tensor whose numbers come later, from a gather."""
    return quantize(torch.zeros(shape, dtype=dtype), _without_effects(quantizer))


def fp8_transpose(data: Tensor, dtype: Any, out: Tensor | None = None) -> Tensor:
    """[..., K] bytes -> [K, ...]."""
    moved = data.movedim(-1, 0).contiguous()
    return moved if out is None else out.copy_(moved)


def swap_first_dims(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """[a, b, ...] -> [b, a, ...]."""
    moved = tensor.transpose(0, 1).contiguous()
    return moved if out is None else out.copy_(moved)


def _without_effects(quantizer: Any) -> Any:
    """A copy that neither communicates nor notes a magnitude."""
    copy = quantizer.copy()
    if hasattr(copy, "with_amax_reduction"):
        copy.with_amax_reduction = False
    if hasattr(copy, "amax"):
        copy.amax = copy.amax.clone()
    return copy


def _per_tensor(tensor: Tensor, quantizer: Any, scale: Tensor) -> dict[str, Tensor | None]:
    data = saturating(tensor.float() * scale, _torch(quantizer.dtype)).view(torch.uint8)
    takes_any_layout = torch.cuda.get_device_capability() >= (10, 0)
    is_transposed = quantizer.columnwise_usage and not takes_any_layout
    return {
        "_data": data if quantizer.rowwise_usage or takes_any_layout else None,
        "_transpose": fp8_transpose(data, quantizer.dtype) if is_transposed else None,
        "_scale_inv": scale.reciprocal().reshape(1),
    }


def _delayed(tensor: Tensor, quantizer: Any) -> dict[str, Tensor | None]:
    """With the scale of the steps before; notes the magnitude, which only ever grows until the histories move on."""
    if tensor.numel():
        quantizer.amax.copy_(torch.maximum(quantizer.amax, tensor.abs().max().float()))
    return _per_tensor(tensor, quantizer, quantizer.scale.reshape(()))


def _current(tensor: Tensor, quantizer: Any) -> dict[str, Tensor | None]:
    largest = tensor.abs().max().float() if tensor.numel() else torch.zeros(())
    if quantizer.with_amax_reduction:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    scale = per_tensor_scale(
        largest.clamp(min=quantizer.amax_epsilon), _torch(quantizer.dtype), is_power_of_two=quantizer.force_pow_2_scales
    )
    return _per_tensor(tensor, quantizer, scale)


def _blockwise(tensor: Tensor, quantizer: Any) -> dict[str, Tensor | None]:
    """Blocks of 128 x 128, or of 128 along the axis that a product sums over, each way with scales of its own."""
    flat, dtype, found = tensor.reshape(-1, tensor.shape[-1]), _torch(quantizer.dtype), {}
    rows = 128 if quantizer.block_scaling_dim == 2 else 1
    options = (quantizer.amax_epsilon, quantizer.force_pow_2_scales)
    if quantizer.rowwise_usage:
        data, scales = block_scales(flat, dtype, rows, *options)
        found |= {"_rowwise_data": data.view(torch.uint8).view(tensor.shape), "_rowwise_scale_inv": scales}
    if quantizer.columnwise_usage:
        data, scales = block_scales(flat.t(), dtype, rows, *options)
        shape = (tensor.shape[-1], *tensor.shape[:-1])
        found |= {"_columnwise_data": data.view(torch.uint8).view(shape), "_columnwise_scale_inv": scales}
    names = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
    return dict.fromkeys(names) | found


def _mx(tensor: Tensor, quantizer: Any) -> dict[str, Tensor | None]:
    """Powers of two for 32 neighbours along a row, and for 32 along a column; columnwise data is not transposed."""
    flat, dtype, found = tensor.reshape(-1, tensor.shape[-1]), _torch(quantizer.dtype), {}
    if quantizer.rowwise_usage:
        data, scales = mx_scales(flat, dtype, (128, 4))
        found |= {"_rowwise_data": data.view(torch.uint8).view(tensor.shape), "_rowwise_scale_inv": scales}
    if quantizer.columnwise_usage:
        data, scales = mx_scales(flat.t(), dtype, (128, 4))
        data, scales = data.t().contiguous(), scales.t().contiguous()
        found |= {"_columnwise_data": data.view(torch.uint8).view(tensor.shape), "_columnwise_scale_inv": scales}
    names = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
    return dict.fromkeys(names) | found


_QUANTISE = {
    "Float8Quantizer": _delayed,
    "Float8CurrentScalingQuantizer": _current,
    "Float8BlockQuantizer": _blockwise,
    "MXFP8Quantizer": _mx,
}


def _made(quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype, found: dict[str, Tensor | None]) -> Any:
    """The tensor, or where `quantizer.internal` the bare storage, around these buffers."""
    from transformer_engine.pytorch import tensor as kinds

    of_tensor = {} if quantizer.internal else {"shape": shape, "dtype": dtype, "device": torch.device("cpu")}
    kind = type(quantizer).__name__
    common = {"fp8_dtype": quantizer.dtype, "quantizer": quantizer, "fake_dtype": dtype, **of_tensor}
    if kind in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        common |= {"data": found["_data"], "data_transpose": found["_transpose"], "fp8_scale_inv": found["_scale_inv"]}
        made = kinds.Float8TensorStorage if quantizer.internal else kinds.Float8Tensor
    else:
        common |= {name.removeprefix("_"): value for name, value in found.items()}
        if kind == "MXFP8Quantizer":
            common["with_gemm_swizzled_scales"] = False
            made = kinds.MXFP8TensorStorage if quantizer.internal else kinds.MXFP8Tensor
        else:
            common["is_2D_scaled"] = quantizer.block_scaling_dim == 2
            made = kinds.Float8BlockwiseQTensorStorage if quantizer.internal else kinds.Float8BlockwiseQTensor
    if not quantizer.internal:
        common.pop("fake_dtype")
    return made(**common)


# --- what quantised tensors stand for -----------------------------------------------------------------------------


def _kind(tensor: Any) -> str:
    """Which of theirs a tensor is; "" for one of torch's."""
    for kind in ("Float8Blockwise", "MXFP8", "Float8"):
        if type(tensor).__name__.startswith(kind):
            return kind
    return ""


def _has_rows(tensor: Any) -> bool:
    return (tensor._data if _kind(tensor) == "Float8" else tensor._rowwise_data) is not None


def _over_columns(tensor: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """[M, K] as a product that sums over K reads it."""
    kind = _kind(tensor)
    if not kind:
        return tensor.reshape(-1, tensor.shape[-1]).to(dtype)
    data = tensor._data if kind == "Float8" else tensor._rowwise_data
    assert data is not None, f"the product sums over columns, for which a {kind} tensor holds nothing"
    shape, data = data.shape, data.reshape(-1, data.shape[-1]).view(_torch(tensor._fp8_dtype)).float()
    if kind == "Float8":
        found = data * tensor._scale_inv
    elif kind == "MXFP8":
        found = data * spread(from_mx_scales(tensor._rowwise_scale_inv, data.shape), 1, 32, data.shape)
    else:
        found = data * from_block_scales(tensor._rowwise_scale_inv, data.shape, tensor._is_2D_scaled)
    return found.to(dtype).view(shape).reshape(-1, shape[-1])


def _over_rows(tensor: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """[M, K] as a product that sums over M reads it."""
    kind = _kind(tensor)
    if not kind:
        return tensor.reshape(-1, tensor.shape[-1]).to(dtype)
    if kind == "Float8":
        if tensor._transpose is None or tensor._transpose_invalid:
            assert torch.cuda.get_device_capability() >= (10, 0), "Hopper multiplies transposes, and there is none"
            return _over_columns(tensor, dtype)
        data = tensor._transpose.flatten(1).view(_torch(tensor._fp8_dtype)).float()
        return (data * tensor._scale_inv).t().to(dtype)
    data = tensor._columnwise_data
    assert data is not None, f"the product sums over rows, for which a {kind} tensor holds nothing"
    if kind == "MXFP8":
        data = data.reshape(-1, data.shape[-1]).view(_torch(tensor._fp8_dtype)).float().t()
        scales = from_mx_scales(tensor._columnwise_scale_inv.t(), data.shape)
        return (data * spread(scales, 1, 32, data.shape)).t().to(dtype)
    data = data.flatten(1).view(_torch(tensor._fp8_dtype)).float()
    return (data * from_block_scales(tensor._columnwise_scale_inv, data.shape, tensor._is_2D_scaled)).t().to(dtype)


# --- products, norms ------------------------------------------------------------------------------------------------


def generic_gemm(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    out: Tensor | None,
    out_quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Tensor,
    workspace_bytes: int,
    accumulate: bool,
    split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple:
    """(op(B) op(A), gradient of the bias or None, None, None), summed in float32; op transposes where it is said to.

    Forward y = x w^T is ("T", "N"), dx = g w is ("N", "N"), dw = g^T x is ("N", "T"), with A = w, w, x.
    """
    assert not gelu and comm_overlap is None and out_quantizer is None, "products with something fused to them"
    dtype = torch.promote_types(*(torch.float32 if _kind(t) else t.dtype for t in (A, B)))
    found = (_over_rows(B).t() if transb else _over_columns(B)) @ (_over_columns(A).t() if transa else _over_rows(A))
    found, bias_gradient = found * alpha, None
    if bias is not None and grad:
        bias_gradient = _over_rows(B).sum(0).to(bias.dtype)
    elif bias is not None:
        found = found + bias.float()
    if out is not None:
        out.copy_(out.view(found.shape).float() + found if accumulate else found)
        return out, bias_gradient, None, None
    leading = (*B.shape[:-1],) if not transb and not _kind(B) else (found.shape[0],)
    made = found.to(_torch(out_dtype) if out_dtype is not None else dtype)
    return made.view(*leading, found.shape[1]), bias_gradient, None, None


def rmsnorm_fwd(x, weight, eps, out, quantizer, dtype, margin, zero_centered) -> tuple:
    """(x / sqrt(mean(x^2) + eps) * weight, None, 1 / sqrt(...)); 1 + weight where it is centred at 0."""
    scale = torch.rsqrt(x.float().square().mean(-1) + eps)
    return _normed(x.float() * scale[:, None], weight, None, out, quantizer, dtype, zero_centered), None, scale


def layernorm_fwd(x, weight, bias, eps, out, quantizer, dtype, margin, zero_centered) -> tuple:
    """((x - mean) / sqrt(variance + eps) * weight + bias, mean, 1 / sqrt(...))."""
    mean = x.float().mean(-1)
    scale = torch.rsqrt(x.float().var(-1, unbiased=False) + eps)
    plain = (x.float() - mean[:, None]) * scale[:, None]
    return _normed(plain, weight, bias, out, quantizer, dtype, zero_centered), mean, scale


def _normed(plain, weight, bias, out, quantizer, dtype, zero_centered) -> Any:
    found = plain * _gamma(weight, zero_centered)
    found = (found if bias is None else found + bias.float()).to(_torch(dtype))
    if quantizer is not None:
        return quantize(found, quantizer, out)
    return found if out is None else out.copy_(found)


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def rmsnorm_bwd(gradient, x, scale, weight, margin, zero_centered) -> tuple[Tensor, Tensor]:
    """(dx, dweight)."""
    plain = x.float() * scale[:, None]
    to_plain = gradient.float() * _gamma(weight, zero_centered)
    to_x = (to_plain - plain * (to_plain * plain).mean(-1, keepdim=True)) * scale[:, None]
    return to_x.to(x.dtype), (gradient.float() * plain).sum(0).to(weight.dtype)


def layernorm_bwd(gradient, x, mean, scale, weight, margin, zero_centered) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias)."""
    plain = (x.float() - mean[:, None]) * scale[:, None]
    to_plain = gradient.float() * _gamma(weight, zero_centered)
    centred = to_plain - to_plain.mean(-1, keepdim=True) - plain * (to_plain * plain).mean(-1, keepdim=True)
    to_weight, to_bias = (gradient.float() * plain).sum(0), gradient.float().sum(0)
    return (centred * scale[:, None]).to(x.dtype), to_weight.to(weight.dtype), to_bias.to(weight.dtype)


# --- many tensors at once -------------------------------------------------------------------------------------------


def multi_tensor_scale(chunk: int, noop: Tensor, lists: list, scale: float) -> None:
    """Each of lists[1] = lists[0] * scale; `noop` becomes 1 where one is not finite."""
    for source, target in zip(*lists, strict=True):
        if not bool(source.isfinite().all()):
            noop.fill_(1)
        target.copy_(source.float() * float(scale))


def multi_tensor_l2norm(chunk: int, noop: Tensor, lists: list, per_tensor: bool = False) -> tuple[Tensor, Tensor]:
    """(norm of all [1], norm of each)."""
    each = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return each.norm().reshape(1), each if per_tensor else each.new_empty(0)


def multi_tensor_adam(
    chunk: int, noop: Tensor, lists: list, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay
) -> None:
    """One step for lists (gradients, parameters, first moments, second moments[, float32 copies]).

    `mode` 1 decays weights apart from the gradient (AdamW), 0 adds the decay to it.
    """
    if bool(noop.item()):
        return
    first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for gradient, parameter, average, square, *master in zip(*lists, strict=True):
        weight = (master[0] if master else parameter).float()
        slope = gradient.float() + (0 if mode else weight_decay * weight)
        mean = average.float() * beta1 + slope * (1 - beta1)
        power = square.float() * beta2 + slope.square() * (1 - beta2)
        update = mean / first / ((power / second).sqrt() + eps) + (weight_decay * weight if mode else 0)
        weight = weight - lr * update
        for target, value in (
            (average, mean),
            (square, power),
            (parameter, weight),
            *((copy, weight) for copy in master),
        ):
            target.copy_(value)


class each_by_itself:
    """In place of torch's manager that sends several collectives as one, which gloo cannot: each is sent at once."""

    def __init__(self, group=None, device=None, async_ops=False):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def wait(self):
        pass
