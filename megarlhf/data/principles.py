"""The written principles by which a model judges or revises answers, and which of them a question is about."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

from megarlhf.errors import DataError

CONSTITUTION = Path(__file__).with_name("constitution.txt")
"""The principles that are used when no file is given."""


def read_principles(path: str, setting: str) -> tuple[str, ...]:
    """One principle a line; blank lines and lines that start with # are passed over. Empty path: the constitution.

    Raises DataError, in which `setting` is what the path was given as.
    """
    file = Path(path) if path else CONSTITUTION
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DataError(f"{setting}: {file.absolute()} cannot be read: {reason}; give one principle a line") from error
    stripped = [line.strip() for line in text.splitlines()]
    principles = tuple(line for line in stripped if line and not line.startswith("#"))
    if not principles:
        raise DataError(f"{setting}: {file.absolute()} holds no principle; write one a line")
    return principles


def draw_principles(principles: Sequence[str], count: int, seed: int, *key: int) -> tuple[str, ...]:
    """`count` different principles in random order: a pure function of the seed and the key (row, sample, ...)."""
    return tuple(Random(f"principles {seed} {key}").sample(list(principles), count))
