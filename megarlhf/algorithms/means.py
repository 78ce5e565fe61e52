"""Sums and means over the rows of a flat micro-batch, divided by counts of the *whole* global minibatch.

A micro-batch returns its share: sum / denominator. Shares and their gradients, *summed* over micro-batches and
data-parallel ranks, are then the mean, and do not depend on the split. No token, no row: 0, never 0 / 0.
"""

from typing import Literal

import torch
from torch import Tensor

from megarlhf.records import Denominators, Mean, Prediction, TokenBatch

LossMean = Literal["token", "sequence", "fixed_length"]


def checked(prediction: Prediction, tokens: TokenBatch) -> Tensor:
    """[N] float32: the predictions, which must be one for each valid token, in float32."""
    values = prediction.value
    assert values.shape == tokens.row.shape, f"{list(values.shape)} values for {list(tokens.row.shape)} valid tokens"
    assert values.dtype == torch.float32, f"losses are computed in float32, not {values.dtype}"
    return values


def row_sums(values: Tensor, tokens: TokenBatch) -> Tensor:
    """[R]: values [N] summed by row."""
    return values.new_zeros(tokens.num_rows).index_add(0, tokens.row, values)


def row_counts(tokens: TokenBatch) -> Tensor:
    """[R] float32: valid tokens of each row."""
    return torch.bincount(tokens.row, minlength=tokens.num_rows).to(torch.float32)


def row_means(values: Tensor, tokens: TokenBatch) -> Tensor:
    """[R]: values [N] averaged by row; 0 for a row without a valid token."""
    return row_sums(values, tokens) / row_counts(tokens).clamp(min=1)


def share(losses: Tensor, denominator: float) -> Tensor:
    """This micro-batch's share of a mean: the sum of losses over a count of the whole minibatch."""
    return losses.sum() / max(denominator, 1.0)


def mean(values: Tensor) -> Mean:
    """The metric that averages values, whichever way the minibatch is split."""
    return Mean(values.detach().to(torch.float32).sum(), float(values.numel()))


def loss_mean(
    losses: Tensor, tokens: TokenBatch, how: LossMean, denominators: Denominators, length: int = 0
) -> tuple[Tensor, Mean]:
    """(this micro-batch's share of the mean of token losses [N], the same as a metric).

    token         sum / valid tokens
    sequence      sum of the rows' token means / rows with a valid token
    fixed_length  sum / (rows with a valid token * length): no response weighs less for being long (Dr. GRPO)
    """
    if how == "token":
        return share(losses, denominators.tokens), mean(losses)
    counts = row_counts(tokens)
    if how == "sequence":
        means = row_means(losses, tokens)[counts > 0]
        return share(means, denominators.rows), mean(means)
    assert length > 0, "loss_mean fixed_length needs a loss_length above 0"
    return share(losses, denominators.rows * length), Mean(losses.detach().sum(), float((counts > 0).sum()) * length)
