"""Reward functions that need no model: f(prompts, responses, metadata) -> one number per response."""

import functools
import re
from collections.abc import Sequence

from megarlhf.errors import RewardError


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
    pairs = zip(responses, patterns, strict=True)
    return [float(re.fullmatch(expression, response, re.DOTALL) is not None) for response, expression in pairs]


def _column(function: str, key: str, metadata: Sequence[dict]) -> list[str]:
    """The texts under `key` of every row; RewardError naming the first row without one."""
    for row in metadata:
        if not isinstance(row.get(key), str):
            raise RewardError(
                f"the reward function {function} needs a text under {key!r} in every line of data.prompts; "
                f"row {row.get('id')!r} has the keys {sorted(row)}"
            )
    return [row[key] for row in metadata]
