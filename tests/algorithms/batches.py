"""Small experiences for the tests of this folder."""

import torch
from torch import Tensor

from megarlhf.records import Denominators, Experience


def experience_of(mask: Tensor, **changes: Tensor) -> Experience:
    """Rows with a prompt of one token and a response over all T positions, of which `mask` [B, T] are valid."""
    num_rows, width = mask.shape
    zeros = torch.zeros(num_rows, width)
    filled = {"logp_rollout": zeros, "logp_start": zeros, "logp_reference": zeros, "value": zeros}
    return Experience(
        tokens=torch.ones(num_rows, width + 1, dtype=torch.int64),
        lengths=torch.full((num_rows,), width + 1),
        prompt_lengths=torch.ones(num_rows, dtype=torch.int64),
        mask=mask,
        row_id=torch.arange(num_rows),
        group=torch.arange(num_rows),
        finished=torch.ones(num_rows, dtype=torch.bool),
        score=torch.zeros(num_rows),
    ).replace(**(filled | changes))


def bools(*rows: list[int]) -> Tensor:
    return torch.tensor(rows).bool()


def floats(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def whole(tokens: float, rows: float = 1.0, groups: float = 1.0) -> Denominators:
    """Counts of a whole minibatch, given by hand."""
    return Denominators(tokens, rows, groups)


def close(found: Tensor, expected: Tensor | list, tolerance: float = 1e-5) -> None:
    """Within an absolute tolerance, and of the same shape."""
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), rtol=0, atol=tolerance)
