"""Reward functions that need no model: f(prompts, responses, metadata) -> one number per response."""

import functools
import re
from collections.abc import Callable, Sequence

from megarlhf.errors import ConfigError, RewardError
from megarlhf.rewards.matching import matches

Rule = Callable[[Sequence[str], Sequence[str], Sequence[dict]], list[float]]


def sentiment(prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[dict]) -> list[float]:
    """VADER's compound sentiment of each response, from -1 (negative) to 1 (positive); 0 for an empty one.

    Source: Hutto and Gilbert 2014, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media
    Text".
    """
    analyzer = _sentiment_analyzer()
    return [analyzer.polarity_scores(response)["compound"] for response in responses]


@functools.cache
def _sentiment_analyzer():
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def length(prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[dict]) -> list[float]:
    """Number of words of each response: a reward that is easy to watch being learned."""
    return [float(len(response.split())) for response in responses]


def exact_match(prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[dict]) -> list[float]:
    """1 where the response equals the row's `answer`, white space around both aside; else 0."""
    answers = _column("exact_match", "answer", metadata)
    return [float(response.strip() == answer.strip()) for response, answer in zip(responses, answers, strict=True)]


def pattern(prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[dict]) -> list[float]:
    """1 where the row's regular expression `pattern` matches the whole response (dots match newlines); else 0."""
    patterns = _column("pattern", "pattern", metadata)
    return list(map(float, matches(patterns, responses, [row.get("id") for row in metadata])))


def format_rule(expression: str) -> Rule:
    """1 where `expression` matches the whole response (dots match newlines), else 0. Raises ConfigError."""
    try:
        re.compile(expression, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"reward.functions: format({expression}): not a regular expression: {error}") from error

    def rule(prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[dict]) -> list[float]:
        ids = [row.get("id", number) for number, row in enumerate(metadata)]
        return list(map(float, matches([expression] * len(responses), responses, ids)))

    return rule


def max_words_rule(limit: str) -> Rule:
    """1 for responses of at most `limit` words, falling in a line to 0 at twice as many. Raises ConfigError."""
    if not limit.isdecimal() or int(limit) < 1:
        raise ConfigError(f"reward.functions: max_words({limit}): give a whole number of words, 1 or more")
    most = int(limit)

    def rule(prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[dict]) -> list[float]:
        return [min(1.0, max(0.0, 2 - len(response.split()) / most)) for response in responses]

    return rule


def _column(function: str, key: str, metadata: Sequence[dict]) -> list[str]:
    """The texts under `key` of every row; RewardError naming the first row without one."""
    for row in metadata:
        if not isinstance(row.get(key), str):
            raise RewardError(
                f"the reward function {function} needs a text under {key!r} in every line of data.prompts; "
                f"row {row.get('id')!r} has the keys {sorted(row)}"
            )
    return [row[key] for row in metadata]
