"""A prompt as the tokenizer made it, and the samples that are drawn from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file."""

    row_id: int
    """Row in the file. Sampling noise is keyed by it, so it must not depend on shuffling or ranks."""
    token_ids: tuple[int, ...]
    """What the policy continues; never empty."""
    text: str
    """The same as text, for reward functions and logs; it is never tokenized again."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The line's other keys, handed to reward functions."""


@dataclass(frozen=True)
class Sample:
    """One response to be drawn: the `sample`-th one of a prompt, which is the `group`-th of its batch."""

    prompt: Prompt
    group: int
    sample: int


def siblings(prompts: Sequence[Prompt], num_samples: int) -> list[Sample]:
    """The B = len(prompts) * num_samples rows of a batch: siblings are consecutive and carry the same group."""
    assert num_samples >= 1, f"num_samples is {num_samples}; at least one response per prompt"
    return [Sample(prompt, group, sample) for group, prompt in enumerate(prompts) for sample in range(num_samples)]
