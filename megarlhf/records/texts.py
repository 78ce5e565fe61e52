"""Texts that are decoded when they are read: a rank that grades a few rows of a batch decodes those alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class DecodedTexts(Sequence[str]):
    """The texts of R rows of token ids, without keeping any."""

    decode: Callable[[list[int]], str]
    tokens: Tensor
    """[B, S] int64: the rows, and others."""
    starts: Tensor
    """[R] int64: first position of each text in its row."""
    ends: Tensor
    """[R] int64: the one after its last."""
    rows: Tensor
    """[R] int64: row of `tokens` that each text is in."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return tuple(self[place] for place in range(*index.indices(len(self))))
        row, start, end = (int(values[index]) for values in (self.rows, self.starts, self.ends))
        return self.decode(self.tokens[row, start:end].tolist())

    def select(self, index: Tensor) -> "DecodedTexts":
        """The texts `index` [n] int64, in that order."""
        return DecodedTexts(self.decode, self.tokens, self.starts[index], self.ends[index], self.rows[index])
