"""Which tokens of rows are computed, and which rows begin with a prompt that is computed once for all of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from megarlhf.records.experience import Experience, last_valid

Reads = Literal["before", "rows"]
"""What is read of a row: hidden states before its valid tokens, or hidden states at any of its tokens."""


@dataclass(frozen=True)
class Spans:
    """Of B rows. Hidden states depend on no later token, so rows that begin alike have them in common."""

    lengths: tuple[int, ...]
    """How many tokens of each row are computed: its first ones."""
    prompts: tuple[int, ...]
    """How many of these its family has in common."""
    families: tuple[int, ...]
    """The first row of those that share a prompt, for each row of them; the row itself where it shares none."""

    @classmethod
    def unshared(cls, lengths: Sequence[int]) -> Self:
        """Rows of these lengths, each on its own."""
        return cls(tuple(lengths), (0,) * len(lengths), tuple(range(len(lengths))))

    @classmethod
    def of(cls, experience: Experience, reads: Reads, *, shares_prompts: bool) -> Self:
        """Rows up to the last token that is read: of a row of which nothing is read, none.

        The rows of a group whose prompts are the same, token by token, are a family, where prompts are shared.
        """
        lengths = experience.lengths.tolist()
        if reads == "before":
            lengths = (last_valid(experience.mask) + 1).tolist()
        if not shares_prompts:
            return cls.unshared(lengths)
        first: dict[tuple[int, bytes], int] = {}
        prompts, families = [], []
        ids, groups = experience.tokens.numpy(), experience.group.tolist()
        siblings = Counter(groups)
        for row, size in enumerate(experience.prompt_lengths.tolist()):
            read = lengths[row] > 0
            prompts.append(size if read else 0)
            is_alone = not read or siblings[groups[row]] == 1
            families.append(row if is_alone else first.setdefault((groups[row], ids[row, :size].tobytes()), row))
        return cls(tuple(lengths), tuple(prompts), tuple(families))

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Of the stream that holds `rows`: a family's prompt once, and what follows it in each row."""
        if len(rows) == 1:
            return self.lengths[rows[0]]
        prompts = {self.families[row]: self.prompts[row] for row in rows}
        return sum(prompts.values()) + sum(self.lengths[row] - self.prompts[row] for row in rows)
