"""Numbers as eight-bit floats times a scale: one scale a tensor, a block of 128, or (MXFP8) 32 in a row.

Definitions are Transformer Engine's (common/recipe, and the pure torch references beside its tests): a scale is the
format's largest number over the largest magnitude of what shares it, and casts saturate, which torch's own do not.
Letters: M rows, K columns, the axis that a matrix product sums over.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megarlhf.models.precision import BLOCK, MX_BLOCK

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Quantised:
    """A matrix as `data` [M, K] of eight-bit floats and `scale_inverse`, one float32 for each block.

    Blocks have `rows` x `columns` elements, fewer at the lower and right edge.
    """

    data: Tensor
    scale_inverse: Tensor
    rows: int
    columns: int

    def dequantised(self) -> Tensor:
        """The float32 values [M, K] that the eight-bit numbers stand for."""
        num_rows, num_columns = self.data.shape
        spread = self.scale_inverse.repeat_interleave(self.rows, 0)[:num_rows]
        return self.data.float() * spread.repeat_interleave(self.columns, 1)[:, :num_columns]

    @property
    def transposed(self) -> "Quantised":
        """The transpose, without quantising again."""
        return Quantised(self.data.t(), self.scale_inverse.t(), self.columns, self.rows)


def saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 values in `dtype`, those beyond its range at its largest number."""
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


def scales(largest: Tensor, dtype: torch.dtype, source: torch.dtype, *, power_of_two: bool) -> Tensor:
    """Scales for blocks whose largest magnitudes are `largest` (float32, any shape), of numbers of type `source`.

    A block of zeros has scale 1. Powers of two are rounded down, so that nothing overflows.
    """
    # Not `max / largest`: torch would multiply by a reciprocal, which can be one unit in the last place off.
    scale = torch.div(torch.finfo(dtype).max, largest)
    scale = torch.where(scale.isinf(), torch.full_like(scale, torch.finfo(source).max), scale)
    if power_of_two:
        scale = torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1)
        scale = torch.where(largest.isinf(), torch.zeros_like(scale), scale)
    return torch.where(largest == 0, torch.ones_like(scale), scale)


def per_tensor(values: Tensor, dtype: torch.dtype) -> Quantised:
    """[M, K] with one scale (Float8CurrentScaling)."""
    largest = _largest(values).max() if values.numel() else torch.zeros((), device=values.device)
    return with_scale(values, scales(largest, dtype, values.dtype, power_of_two=False), dtype)


def with_scale(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Quantised:
    """[M, K] with a scale that is known already (a float32 scalar): what delayed scaling does."""
    data = saturated(values.float() * scale, dtype)
    return Quantised(data, scale.reciprocal().reshape(1, 1), max(values.shape[0], 1), max(values.shape[1], 1))


def per_block(values: Tensor, dtype: torch.dtype, rows: int, *, power_of_two: bool = True) -> Quantised:
    """[M, K] in blocks of `rows` x 128: 1 row for activations and gradients, 128 for weights (Float8BlockScaling)."""
    tiles = _tiles(values, rows, BLOCK)
    scale = scales(tiles.abs().amax((1, 3)), dtype, values.dtype, power_of_two=power_of_two)
    return _from_tiles(tiles * scale[:, None, :, None], scale.reciprocal(), values.shape, dtype)


def per_32(values: Tensor, dtype: torch.dtype) -> Quantised:
    """[M, K] with a power of two for every 32 in a row, rounded up so that nothing saturates (MXFP8BlockScaling)."""
    tiles = _tiles(values, 1, MX_BLOCK)
    scale_inverse = _power_of_two_above(tiles.abs().amax((1, 3)) / torch.finfo(dtype).max)
    return _from_tiles(tiles / scale_inverse[:, None, :, None], scale_inverse, values.shape, dtype)


def _power_of_two_above(values: Tensor) -> Tensor:
    """The smallest power of two at or above each value, within the exponents of E8M0 (2^-127 to 2^127)."""
    mantissa, exponent = torch.frexp(values)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    exponent = torch.where(values == 0, torch.full_like(exponent, -127), exponent).clamp(-127, 127)
    return torch.ldexp(torch.ones_like(values), exponent)


def _largest(values: Tensor) -> Tensor:
    return values.detach().abs().float()


def _tiles(values: Tensor, rows: int, columns: int) -> Tensor:
    """[M, K] -> float32 [M/rows, rows, K/columns, columns], zeros past the edges."""
    padded = F.pad(values.detach().float(), (0, -values.shape[1] % columns, 0, -values.shape[0] % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def _from_tiles(scaled: Tensor, scale_inverse: Tensor, shape: torch.Size, dtype: torch.dtype) -> Quantised:
    _, rows, _, columns = scaled.shape
    data = saturated(scaled, dtype).flatten(2).flatten(0, 1)[: shape[0], : shape[1]]
    return Quantised(data.contiguous(), scale_inverse, rows, columns)
