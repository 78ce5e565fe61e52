"""Reward functions that tests name as a user would: `tests.loop.plugin:FUNCTION`."""


def capitals(prompts: list[str], responses: list[str], metadata: list[dict]) -> list[float]:
    """The share of characters that are capital letters."""
    return [sum(character.isupper() for character in text) / max(1, len(text)) for text in responses]


def capitals_after_a_to_m(prompts: list[str], responses: list[str], metadata: list[dict]) -> list[float]:
    """As `capitals` where the prompt begins with one of a to m; the same score for all responses elsewhere."""
    scores = capitals(prompts, responses, metadata)
    return [score if prompt[0] <= "m" else 0.5 for prompt, score in zip(prompts, scores, strict=True)]
