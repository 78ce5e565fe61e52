"""Which rows of a micro-batch are compared with which: all pairs of a group in which one row is preferred."""

from typing import NamedTuple

import torch
from torch import Tensor

from megarlhf.algorithms.means import row_counts
from megarlhf.records import Mean, TokenBatch


class Pairs(NamedTuple):
    """P comparisons. Groups without one, and rows without a valid token, do not appear."""

    better: Tensor
    """[P] int64: the row that should win."""
    worse: Tensor
    """[P] int64."""
    weight: Tensor
    """[P] float32: 1 / number of comparisons in the group, so that every group counts the same."""

    def share(self, losses: Tensor, denominator: float) -> Tensor:
        """This micro-batch's share of the mean over groups of the mean over their pairs; losses [P]."""
        return (self.weight * losses).sum() / max(denominator, 1.0)

    def mean(self, values: Tensor) -> Mean:
        """The metric of the same mean; values [P]."""
        return Mean((self.weight * values.detach().to(torch.float32)).sum(), self.weight.sum())


def pairs(tokens: TokenBatch) -> Pairs:
    """All (better, worse) with the same group and a larger preference; ties are not compared.

    For a pair of one chosen and one rejected row that is the pair; for K ranked answers all K (K - 1) / 2 of them,
    weighted as by Ouyang et al. (InstructGPT, 2022, equation 1).
    """
    assert tokens.preference is not None and tokens.group is not None, "tokens lack preference or group"
    group, preference, valid = tokens.group, tokens.preference, row_counts(tokens) > 0
    wins = (group[:, None] == group) & (preference[:, None] > preference) & valid[:, None] & valid
    better, worse = wins.nonzero(as_tuple=True)
    in_group = torch.bincount(group[better], minlength=max(tokens.num_rows, 1))
    return Pairs(better, worse, 1.0 / in_group[group[better]].to(torch.float32))
