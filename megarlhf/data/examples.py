"""One entry of a data set as token ids: a prompt, and the answers to it that are compared, scored or imitated."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self


@dataclass(frozen=True)
class Answer:
    """What follows the prompt, and what the data set says about it."""

    token_ids: tuple[int, ...]
    """Never empty; its stop token included."""
    text: str
    """The same as text, for logs; it is never tokenized again."""
    finished: bool
    """It ends as a sampled answer would: with a stop token."""
    trained: tuple[bool, ...] | None = None
    """Which of its tokens the assistant wrote; None for all. A conversation holds other turns too."""
    preference: float | None = None
    """Larger is better among the answers to this prompt: chosen 1, rejected 0; minus the rank; desirable 1 or not 0."""
    margin: float | None = None
    """By how much the chosen answer should win at least."""
    score: float | None = None
    """Grade on the data set's own scale."""
    attributes: tuple[float | None, ...] | None = None
    """Several grades, in the order of the settings; None where one is missing."""


@dataclass(frozen=True)
class Example:
    """A prompt and its answers, which become the rows of one group. They share the prompt, so all of them mask it."""

    row_id: int
    """Row of the file; the pieces of a text that was split share it."""
    prompt_ids: tuple[int, ...]
    """Never empty: what the model is given. Of a plain text, its first token."""
    prompt: str
    """The same as text, for logs."""
    answers: tuple[Answer, ...]
    """At least one."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The row's other keys."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest row."""
        return len(self.prompt_ids) + max(len(answer.token_ids) for answer in self.answers)

    def with_answers(self, answers: tuple[Answer, ...]) -> Self:
        """The same prompt with other answers."""
        return replace(self, answers=answers)
