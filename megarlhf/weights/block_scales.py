"""FP8 weights with a scale a block of 128 x 128 (`weight` and `weight_scale_inv`), read as bfloat16.

The product of value and scale is rounded to bfloat16 once, as transformers and DeepSeek's own script do.
"""

from collections.abc import Iterable

import torch

from megarlhf.models.quantisation_config import BLOCK
from megarlhf.weights.boxes import Box, shape_of, slices

FP8 = "F8_E4M3"
"""safetensors' name for float8_e4m3fn."""
SCALE_SUFFIX = "_scale_inv"
_BAND_BLOCKS = 8


def scale_shape(shape: Iterable[int]) -> tuple[int, ...]:
    """Shape of the scales of a weight: one for each block, the last blocks of rows and columns may be smaller."""
    return tuple(-(-size // BLOCK) for size in shape)


def read_scaled(values, scales, box: Box) -> torch.Tensor:
    """One box of value * scale, bfloat16. `values` and `scales` are safetensors slices of the whole tensors.

    Beside the result only a few blocks of rows are held at a time, in float32.
    """
    (first, last), (left, right) = box
    result = torch.empty(shape_of(box), dtype=torch.bfloat16)
    columns = torch.arange(left, right) // BLOCK - left // BLOCK
    start = first
    while start < last:
        stop = min((start // BLOCK + _BAND_BLOCKS) * BLOCK, last)
        blocks = ((start // BLOCK, -(-stop // BLOCK)), (left // BLOCK, -(-right // BLOCK)))
        rows = torch.arange(start, stop) // BLOCK - start // BLOCK
        factors = scales[slices(blocks)].float()[rows][:, columns]
        band = values[slices(((start, stop), (left, right)))].float() * factors
        result[start - first : stop - first] = band.to(torch.bfloat16)
        start = stop
    return result
