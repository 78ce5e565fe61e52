"""The reward functions that come with megarlhf."""

import threading
import time
from itertools import pairwise

import pytest

from megarlhf.errors import ConfigError, RewardError
from megarlhf.rewards import builtin
from megarlhf.rewards.functions import BUILTIN, call_reward, resolve
from megarlhf.rewards.matching import matches


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


def test_a_pattern_that_never_ends_is_told_with_its_row_and_holds_nobody_up():
    ticks = []
    clock = threading.Thread(target=lambda: [(ticks.append(time.monotonic()), time.sleep(0.02)) for _ in range(20)])
    clock.start()
    with pytest.raises(RewardError, match=r"row 'b': the regular expression '\(a\+\)\+\$' gives no answer in 0.5 s"):
        matches(["a*", "(a+)+$"], ["aa", "a" * 40 + "b"], ["a", "b"], limit_s=0.5)
    clock.join()
    assert max(after - before for before, after in pairwise(ticks)) < 0.4


def test_a_pattern_that_is_none_is_told_with_its_row():
    with pytest.raises(RewardError, match=r"row 'y': the regular expression '\(' cannot be used: .*missing \)"):
        builtin.pattern(["p"] * 2, ["a", "a"], [{"id": "x", "pattern": "a"}, {"id": "y", "pattern": "("}])


@pytest.mark.parametrize(("name", "key"), [("exact_match", "answer"), ("pattern", "pattern")])
def test_a_row_without_what_the_grader_reads_is_named(name, key):
    metadata = [{"id": "a", key: "x"}, {"id": "b", "other": 1}]
    with pytest.raises(RewardError, match=rf"needs a text under '{key}' .* row 'b' has the keys \['id', 'other'\]"):
        call_reward(BUILTIN[name], ["p", "p"], ["r", "r"], metadata, 5.0)


def test_format_matches_the_whole_response():
    rule = resolve(r"format(<think>.*</think>\s*\\boxed\{(\d+|x:y)\})")
    responses = [
        "<think>a\nb</think> \\boxed{7}",
        "<think></think>\\boxed{x:y}",
        "\\boxed{7}",
        "a<think></think>\\boxed{7}",
    ]
    assert rule(["p"] * 4, responses, [{}] * 4) == [1.0, 1.0, 0.0, 0.0]


def test_max_words_falls_in_a_line_beyond_the_limit():
    rule = resolve("max_words(4)")
    assert rule(["p"] * 5, ["", "a b c d", "a b c d e", "a b c d e f", "a " * 9], [{}] * 5) == [
        1.0,
        1.0,
        0.75,
        0.5,
        0.0,
    ]


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("format((a)", "not a regular expression"),
        ("max_words(few)", "a whole number of words"),
        ("max_words(²)", "a whole number of words"),
    ],
)
def test_a_rule_with_a_wrong_argument_is_a_settings_error(spec, complaint):
    with pytest.raises(ConfigError, match=complaint):
        resolve(spec)
