"""The average follows the weights by its formula, keeps its precision, and leaves no trace in the model."""

import pytest
import torch

from megarlhf.residency.average import Average


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_follows_its_formula_in_float32(dtype):
    weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    average = Average({"w": weight}, decay=0.999)
    expected = 1.0
    for _ in range(3):
        weight.data.add_(1.0)
        average.update({"w": weight})
        expected = 0.999 * expected + 0.001 * float(weight[0])
    before = weight.detach().clone()
    for _ in range(2):
        with average.swapped_in({"w": weight}):
            assert float(weight[0]) == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 4e-3)
        assert torch.equal(weight, before)


def test_a_decay_of_one_is_refused():
    with pytest.raises(AssertionError, match="below 1"):
        Average({}, decay=1.0)
