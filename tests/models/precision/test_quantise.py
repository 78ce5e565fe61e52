"""Quantised values against Transformer Engine's own quantiser, bit by bit, and against slow definitions."""

import itertools
from fractions import Fraction

import pytest
import torch

from megarlhf.models.precision.quantise import BLOCK, E4M3, E5M2, per_32, per_block, per_tensor, saturated, scales
from tests.models.precision.references import current_scaling

SHAPES = ((1, 1), (3, 200), (128, 128), (130, 257), (256, 384))
DTYPES = (torch.float32, torch.bfloat16)
MAGNITUDES = (1e-30, 1e-3, 1.0, 3e4)


def numbers(shape, magnitude: float, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).exp() * magnitude
    return values.to(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("shape, dtype, magnitude", list(itertools.product(SHAPES, DTYPES, MAGNITUDES)))
@pytest.mark.parametrize("format", [E4M3, E5M2])
def test_per_tensor_equals_transformer_engine_bit_by_bit(shape, dtype, magnitude, format):
    values = numbers(shape, magnitude, dtype)
    theirs = current_scaling().CurrentScalingQuantizerRef(format).quantize(values)
    ours = per_tensor(values, format)
    assert same_bits(ours.data, theirs.data)
    assert torch.equal(ours.scale_inverse.flatten(), theirs.scale)


@pytest.mark.parametrize("shape, dtype, magnitude", list(itertools.product(SHAPES, DTYPES, MAGNITUDES)))
@pytest.mark.parametrize("rows", [1, BLOCK])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_blocks_equal_transformer_engine_applied_to_each_block(shape, dtype, magnitude, rows, power_of_two):
    if rows == 1 and shape[0] > 3:
        shape = (3, shape[1])  # a block a row: the slow loop would be long
    values = numbers(shape, magnitude, dtype)
    quantiser = current_scaling().CurrentScalingQuantizerRef(E4M3, pow_2_scales=power_of_two)
    ours = per_block(values, E4M3, rows, power_of_two=power_of_two)
    for i, top in enumerate(range(0, shape[0], rows)):
        for j, left in enumerate(range(0, shape[1], BLOCK)):
            theirs = quantiser.quantize(values[top : top + rows, left : left + BLOCK])
            assert same_bits(ours.data[top : top + rows, left : left + BLOCK].contiguous(), theirs.data)
            assert torch.equal(ours.scale_inverse[i, j].view(1), theirs.scale)


@pytest.mark.parametrize("format, largest", [(E4M3, 448), (E5M2, 57344)])
@pytest.mark.parametrize("magnitude", [1e-20, 1.0, 1e6])
def test_mxfp8_scales_are_the_smallest_powers_of_two_that_fit(format, largest, magnitude):
    values = numbers((5, 70), magnitude)
    values[0, :32] = 0
    values[1, 0] = largest * 2.0**-3  # exactly a power of two times the largest number
    ours = per_32(values, format)
    for row, block in itertools.product(range(5), range(3)):
        inside = values[row, 32 * block : 32 * block + 32]
        peak = Fraction(float(inside.abs().max()))
        power = Fraction(float(ours.scale_inverse[row, block]))
        if peak == 0:
            assert power == Fraction(1, 2**127)
            continue
        assert peak / power <= largest < 2 * peak / power
        expected = saturated(inside.double().div(float(power)).float(), format)
        assert same_bits(ours.data[row, 32 * block : 32 * block + 32].contiguous(), expected)


def test_casts_saturate():
    assert saturated(torch.tensor([1e9, -1e9]), E5M2).float().tolist() == [57344.0, -57344.0]
    assert saturated(torch.tensor([1e9, -1e9]), E4M3).float().tolist() == [448.0, -448.0]


def test_scales_of_nothing_and_of_everything():
    largest = torch.tensor([0.0, 1e-45, float("inf")])
    found = scales(largest, E4M3, torch.bfloat16, power_of_two=False)
    assert found.tolist() == [1.0, torch.finfo(torch.bfloat16).max, 0.0]


def test_the_transpose_of_a_quantised_matrix_stands_for_the_same_numbers():
    values = numbers((130, 257), 1.0)
    for quantised in (per_block(values, E4M3, 1), per_block(values, E4M3, BLOCK), per_32(values, E4M3)):
        assert torch.equal(quantised.transposed.dequantised(), quantised.dequantised().t())


@pytest.mark.parametrize("format, error", [(E4M3, 0.0265), (E5M2, 0.053)])
def test_rounding_error_of_one_operand(format, error):
    """2^-4 (2^-3) relative spacing, uniform within a binade: 2.65 % (5.3 %) root mean square on Gaussian numbers."""
    values = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    for quantised in (per_tensor(values, format), per_block(values, format, 1), per_32(values, format)):
        difference = (quantised.dequantised() - values).norm() / values.norm()
        assert abs(float(difference) - error) < 0.1 * error
