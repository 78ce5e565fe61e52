"""The reward functions that come with megarlhf."""

import pytest

from megarlhf.errors import RewardError
from megarlhf.rewards import builtin
from megarlhf.rewards.functions import BUILTIN, call_reward


def test_sentiment_likes_praise_and_not_blame():
    pytest.importorskip("vaderSentiment")
    texts = ["I love this wonderful film!", "The chair is brown.", "A dreadful, boring mess.", ""]
    good, neutral, bad, empty = builtin.sentiment([""] * 4, texts, [{}] * 4)
    assert 1 >= good > 0.5 and neutral == empty == 0.0 and -1 <= bad < -0.5


def test_length_counts_words():
    assert builtin.length(["p"] * 3, ["one two\nthree", " ", "x"], [{}] * 3) == [3.0, 0.0, 1.0]


def test_exact_match_ignores_space_around_only():
    rows = [{"answer": "42"}] * 3
    assert builtin.exact_match(["p"] * 3, [" 42\n", "4 2", "42."], rows) == [1.0, 0.0, 0.0]


def test_pattern_matches_the_whole_response():
    rows = [{"pattern": r"<think>.*</think>\d+"}] * 3
    responses = ["<think>a\nb</think>7", "x<think></think>7", "<think></think>"]
    assert builtin.pattern(["p"] * 3, responses, rows) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(("name", "key"), [("exact_match", "answer"), ("pattern", "pattern")])
def test_a_row_without_what_the_grader_reads_is_named(name, key):
    metadata = [{"id": "a", key: "x"}, {"id": "b", "other": 1}]
    with pytest.raises(RewardError, match=rf"needs a text under '{key}' .* row 'b' has the keys \['id', 'other'\]"):
        call_reward(BUILTIN[name], ["p", "p"], ["r", "r"], metadata, 5.0)
