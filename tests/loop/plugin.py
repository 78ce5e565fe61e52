"""Reward functions that tests name as a user would: `tests.loop.plugin:FUNCTION`."""

import time
from itertools import count


def capitals(prompts: list[str], responses: list[str], metadata: list[dict]) -> list[float]:
    """The share of characters that are capital letters."""
    return [sum(character.isupper() for character in text) / max(1, len(text)) for text in responses]


def capitals_after_a_to_m(prompts: list[str], responses: list[str], metadata: list[dict]) -> list[float]:
    """As `capitals` where the prompt begins with one of a to m; the same score for all responses elsewhere."""
    scores = capitals(prompts, responses, metadata)
    return [score if prompt[0] <= "m" else 0.5 for prompt, score in zip(prompts, scores, strict=True)]


_calls = count(1)


def asleep(prompts: list[str], responses: list[str], metadata: list[dict]) -> list[float]:
    """Falls asleep in its fourth call."""
    if next(_calls) >= 4:
        time.sleep(600)
    return capitals(prompts, responses, metadata)


def failing(prompts: list[str], responses: list[str], metadata: list[dict]) -> list[float]:
    """Gives no scores."""
    raise ArithmeticError("no scores today")
