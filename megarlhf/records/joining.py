"""Batches put below one another: the rows of several experiences as one."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from megarlhf.records.experience import Experience


def join(parts: Sequence[Experience]) -> Experience:
    """All rows in order, padded to the widest part; groups are renumbered so that parts share none.

    Every part has the same fields filled.
    """
    assert parts, "nothing to join"
    width = max(part.tokens.shape[1] for part in parts)
    groups, offset = [], 0
    for part in parts:
        groups.append(part.group - part.group.min() + offset)
        offset = int(groups[-1].max()) + 1
    joined: dict[str, Any] = {"group": torch.cat(groups)}
    for item in fields(Experience):
        values = [vars(part)[item.name] for part in parts]
        if item.name == "group" or all(value is None for value in values):
            continue
        assert not any(value is None for value in values), f"{item.name} is filled in some parts only"
        is_padded = isinstance(values[0], Tensor) and values[0].dim() == 2 and item.name != "attributes"
        columns = (width if item.name == "tokens" else width - 1) if is_padded else None
        joined[item.name] = _stacked(values, columns)
    return Experience(**joined)


def _stacked(values: list[Any], columns: int | None) -> Any:
    """Texts, values of rows, or [B, S] and [B, T] ones padded to `columns`."""
    if not isinstance(values[0], Tensor):
        return tuple(entry for value in values for entry in value)
    if columns is None:
        return torch.cat(values)
    return torch.cat([torch.nn.functional.pad(value, (0, columns - value.shape[1])) for value in values])
