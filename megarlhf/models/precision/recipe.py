"""What a recipe makes of the three operands of a linear's products: input, weight, and gradient of the output.

y = x w^T sums over the columns of x and w, dx = g w over the rows of w, dw = g^T x over the rows of g and x. A
one-sided block (1 x 128, 1 x 32) runs along the axis that is summed over, so such an operand is quantised twice, once
each way.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.config.precision import FP8
from megarlhf.models.precision import BLOCK
from megarlhf.models.precision.quantise import (
    E4M3,
    E5M2,
    Quantised,
    per_32,
    per_block,
    per_tensor,
    scales,
    with_scale,
)


@dataclass(frozen=True)
class Operand:
    """A matrix [M, K] quantised for products that sum over its columns, and for those that sum over its rows."""

    over_columns: Quantised
    over_rows: Quantised


@dataclass
class History:
    """Largest magnitudes of one operand over the last steps, and the scale that delayed scaling takes from them."""

    length: int
    largest: list[float] = field(default_factory=list)
    scale: float = 1.0
    current: float = 0.0
    """Largest magnitude seen since the last `advance`."""

    def quantised(self, values: Tensor, dtype: torch.dtype) -> Quantised:
        """[M, K] with the scale of the steps before; notes the magnitude for the next."""
        if values.numel():
            self.current = max(self.current, float(values.detach().abs().max()))
        return with_scale(values.detach(), torch.tensor(self.scale, device=values.device), dtype)

    def advance(self, dtype: torch.dtype) -> None:
        """Ends a step: the scale becomes that of the largest magnitude in the history."""
        self.largest = [self.current, *self.largest][: self.length]
        self.current, peak = 0.0, max(self.largest)
        if 0 < peak < float("inf"):
            self.scale = float(scales(torch.tensor(peak), dtype, torch.float32, power_of_two=False))


@dataclass
class Histories:
    """Delayed scaling's memory of one linear."""

    input: History
    weight: History
    gradient: History

    @classmethod
    def empty(cls, length: int) -> "Histories":
        """Before the first step: all scales are 1."""
        return cls(History(length), History(length), History(length))

    def advance(self, settings: FP8, group: dist.ProcessGroup | None) -> None:
        """Ends a step. Collective over `group`, whose ranks then have the same scales."""
        histories = (self.input, self.weight, self.gradient)
        if group is not None and group.size() > 1:
            seen = torch.tensor([history.current for history in histories])
            dist.all_reduce(seen, dist.ReduceOp.MAX, group=group)
            for history, value in zip(histories, seen.tolist(), strict=True):
                history.current = value
        for history, dtype in zip(histories, (E4M3, E4M3, gradient_format(settings)), strict=True):
            history.advance(dtype)


def gradient_format(settings: FP8) -> torch.dtype:
    """The eight-bit type of gradients."""
    return E5M2 if settings.format == "hybrid" else E4M3


def operand(values: Tensor, settings: FP8, dtype: torch.dtype, *, is_weight: bool, history: History | None) -> Operand:
    """[M, K] under a recipe; `history` is what delayed scaling goes by."""
    if settings.recipe == "tensorwise":
        return _either_way(per_tensor(values, dtype))
    if settings.recipe == "delayed":
        assert history is not None, "delayed scaling without a history"
        return _either_way(history.quantised(values, dtype))
    if settings.recipe == "blockwise" and is_weight:
        return _either_way(per_block(values, dtype, BLOCK))
    if settings.recipe == "blockwise":
        return Operand(per_block(values, dtype, 1), per_block(values.t(), dtype, 1).transposed)
    assert settings.recipe == "mxfp8", f"no rule for the recipe {settings.recipe}"
    return Operand(per_32(values, dtype), per_32(values.t(), dtype).transposed)


def _either_way(quantised: Quantised) -> Operand:
    return Operand(quantised, quantised)
