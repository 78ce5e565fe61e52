"""Scales of eight-bit numbers, and how Transformer Engine lays them out beside the numbers.

1 x 128: scales [K/128, M to a multiple of 4]. 128 x 128: [M/128, K/128 to a multiple of 4]. MXFP8: bytes that are
exponents, [M to a multiple of 128, K/32 to a multiple of 4].
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def saturating(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 in eight bits, what is out of range at its end."""
    largest = torch.finfo(dtype).max
    return torch.minimum(torch.maximum(values, values.new_tensor(-largest)), values.new_tensor(largest)).to(dtype)


def per_tensor_scale(largest: Tensor, dtype: torch.dtype, *, is_power_of_two: bool) -> Tensor:
    """format's largest / `largest`, 1 for zeros; rounded down to a power of two if asked for."""
    top = torch.full_like(largest, torch.finfo(dtype).max)
    scale = torch.where(largest > 0, top.div(largest), torch.ones_like(top))
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    if not is_power_of_two:
        return scale
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)  # keeps the exponent


def block_scales(
    values: Tensor, dtype: torch.dtype, rows: int, epsilon: float, is_power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """[M, K] -> (eight-bit numbers [M, K], inverse scales in their layout)."""
    tall, wide = -(-values.shape[0] // rows), -(-values.shape[1] // 128)
    source = values.float()
    largest = torch.zeros(tall, wide)
    for column in range(wide):
        across = source[:, column * 128 : (column + 1) * 128].abs().amax(1)
        largest[:, column] = torch.stack([part.max() for part in across.split(rows)]) if rows > 1 else across
    scale = per_tensor_scale(largest.clamp(min=epsilon), dtype, is_power_of_two=is_power_of_two)
    data = saturating(source * spread(scale, rows, 128, values.shape), dtype).contiguous()
    inverse = scale.reciprocal() if rows > 1 else scale.reciprocal().t()
    return data, F.pad(inverse, (0, -inverse.shape[1] % 4)).contiguous()


def from_block_scales(inverse: Tensor, shape: torch.Size, is_square: bool) -> Tensor:
    """Inverse scales in their layout -> one for each of [M, K]."""
    tall, wide = shape[0] if not is_square else -(-shape[0] // 128), -(-shape[1] // 128)
    scales = inverse[:tall, :wide] if is_square else inverse[:wide, :tall].t()
    return spread(scales, 128 if is_square else 1, 128, shape)


def mx_scales(values: Tensor, dtype: torch.dtype, multiples: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """[M, K] -> (eight-bit numbers [M, K], exponents as bytes, 127 for 1), rounded up so that nothing saturates."""
    largest = F.pad(values.float(), (0, -values.shape[1] % 32)).unflatten(1, (-1, 32)).abs().amax(2)
    wanted = largest / torch.finfo(dtype).max
    bits = wanted.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)  # the byte of a float32 is the exponent of E8M0
    exponent = exponent.clamp(0, 254)
    scale = torch.ldexp(torch.ones_like(wanted), -(exponent - 127))
    data = saturating(values.float() * spread(scale, 1, 32, values.shape), dtype).contiguous()
    padding = (0, -exponent.shape[1] % multiples[1], 0, -exponent.shape[0] % multiples[0])
    return data, F.pad(exponent, padding).to(torch.uint8)


def from_mx_scales(exponents: Tensor, shape: torch.Size) -> Tensor:
    """Bytes -> float32 [M, K/32]."""
    exponents = exponents[: shape[0], : -(-shape[1] // 32)].int() - 127
    return torch.ldexp(torch.ones(exponents.shape), exponents)


def spread(scales: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    """One for each block of rows x columns -> one for each of [M, K]."""
    wide = scales.repeat_interleave(columns, 1)[:, : shape[1]]
    return wide.repeat_interleave(rows, 0)[: shape[0]]
