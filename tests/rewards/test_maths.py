"""The maths answer check: which answers are found in a response, and which mean the same."""

import time

import pytest

from megarlhf.errors import RewardError
from megarlhf.rewards.maths import final_answer, is_right, maths, same_answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"So \boxed{3} at first, but then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("half of them: 72 / 2 = 36\n#### 36", "36"),
        ("#### 1,234\nthank you", "1,234"),
        ("The answer is 42.", "42"),
        ("The final answer is: 3/4 of a cup.", "3/4"),
        ("We get 10, then 20, then -7.5 in the end", "-7.5"),
        (r"unclosed \boxed{5 but 6", "6"),
        ("no number at all", None),
        ("", None),
    ],
)
def test_the_final_answer_is_found(response, answer):
    assert final_answer(response) == answer


SAME = [
    ("0.5", "1/2"),
    (r"\frac{1}{2}", ".5"),
    (r"\dfrac12", "0.50"),
    (r"1\frac{1}{2}", "3/2"),
    ("$1,234,567$", "1234567"),
    (r"\$18", "18"),
    ("50%", r"50\%"),
    (r"90^\circ", "90"),
    ("x = 5", "5"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"\sqrt{\frac{4}{9}}", "2/3"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"\sqrt[3]{27}", "3"),
    (r"2\pi", r"\pi \cdot 2"),
    ("-3", "−3"),
    ("2^{10}", "1024"),
    ("2^-1", "0.5"),
    ("3(x+1)", "3x + 3"),
    ("x^2+2x+1", "(x+1)^2"),
    ("(1, 2)", r"\left(1, \frac{4}{2}\right)"),
    (r"\text{east}", "East"),
    ("2xy", "2yx"),
    ("7.", "7"),
    (r"-1\frac{1}{2}", "-1.5"),
    (r"2 \cdot 1\frac12", "3"),
    (r"5 - 1\frac12", "3.5"),
    ("2 1/2", "2.5"),
    ("-2 1/2", r"-\frac{5}{2}"),
    ("10 000", "10000"),
    ("12{,}345", "12,345"),
    (r"\text{(A)}", "(a)"),
]


@pytest.mark.parametrize(("left", "right"), SAME)
def test_answers_that_mean_the_same(left, right):
    assert same_answer(left, right) and same_answer(right, left)


DIFFERENT = [
    ("0.333", "1/3"),
    ("1/2", "2"),
    ("3x", "3y"),
    ("x^2", "2x"),
    ("(1, 2)", "(2, 1)"),
    ("(1, 2)", "[1, 2]"),
    ("1, 2", "1"),
    ("east", "west"),
    ("east", "seat"),
    ("3 apples", "apples 3"),
    ("1/0", "1/0 + 1"),
    (r"\sqrt{-1}", "1"),
    ("", ""),
    ("{}", ""),
    (r"\text{}", "}"),
    ("12", "1 2 3"),
    ("3 4", "12"),
    ("3 4", "34"),
    ("2 1/2", "1"),
    ("1 1/2", "11/2"),
    ("1 000", "0"),
    (r"-1\frac{1}{2}", "-0.5"),
    (r"\frac{1}{23}", r"\frac{12}{3}"),
    (r"2^{1}0", "2^{10}"),
    ("9" * 500, "9" * 499 + "8"),
]


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_answers_that_differ(left, right):
    assert not same_answer(left, right) and not same_answer(right, left)


def test_responses_that_never_come_to_the_point_cost_little():
    start = time.process_time()
    assert final_answer("\\boxed{" * 20_000 + "7") == "7"
    assert final_answer("the answer is" + "\n" * 20_000) is None
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    "text", ["9^9^9^9^9", "2^(10^9)", "(" * 300 + "1" + ")" * 300, "9" * 300 + "^64", "__import__('os')", "1" * 100_000]
)
def test_hostile_answers_cost_nothing(text):
    start = time.process_time()
    assert not same_answer(text, "1")
    assert not is_right(rf"\boxed{{{text}}}", "1")
    assert time.process_time() - start < 1


def test_each_row_is_checked_against_its_own_answer():
    rows = [{"answer": "half of it\n#### 1/2"}, {"answer": 7}, {"answer": "3.0"}]
    assert maths(["p"] * 3, [r"\boxed{0.5}", "it is 8", "#### 3"], rows) == [1.0, 0.0, 1.0]


def test_a_row_without_an_answer_is_named():
    with pytest.raises(RewardError, match=r"'answer' .* row 4 has the keys \['id', 'solution'\]"):
        maths(["p"], ["1"], [{"id": 4, "solution": "1"}])
