"""Rows that are too long: refused, dropped or cut by the stated rule, and never without a word."""

import logging

import pytest

from megarlhf.errors import DataError

PAIR = {"prompt": "pq", "chosen": "abcx", "rejected": "abcy"}
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def test_a_pair_that_is_equal_once_it_is_cut_is_dropped_and_counted(examples, caplog):
    """Prompt of 2 tokens, answers of 4 that differ in the last: at most 5 tokens leave the same 3 of each."""
    with caplog.at_level(logging.WARNING):
        (left,) = examples("preferences", [PAIR, PAIR | {"rejected": "z"}], max_tokens=5, too_long="truncate_right")
    assert left.row_id == 1 and "1 with identical answers" in caplog.text
    assert "2 of 2 rows are longer than data.max_tokens 5 (data.too_long: truncate_right)" in caplog.text
    (kept,) = examples("preferences", [PAIR], max_tokens=6, too_long="truncate_right")
    assert [answer.text for answer in kept.answers] == ["abcx", "abcy"]


def test_a_cut_answer_gets_no_end_token(examples):
    (example,) = examples("preferences", [PAIR | {"rejected": "z"}], max_tokens=5, too_long="truncate_right")
    chosen, rejected = example.answers
    assert (chosen.text, chosen.finished, rejected.finished) == ("abc", False, True)
    assert 0 not in chosen.token_ids and rejected.token_ids[-1] == 0


def test_cutting_on_the_left_shortens_the_prompt_alike_for_all_answers(examples):
    (example,) = examples("preferences", [PAIR | {"rejected": "z"}], max_tokens=6, too_long="truncate_left")
    assert (example.prompt, [answer.text for answer in example.answers]) == ("q", ["abcx", "z"])
    assert example.num_tokens == 6


@pytest.mark.parametrize(
    ("kind", "row", "settings", "complaint"),
    [
        ("preferences", PAIR, {}, "7 tokens, more than data.max_tokens 4; raise it, or set data.too_long to drop"),
        ("demonstrations", {"text": "abcdef"}, {}, "truncate_right or split"),
        ("preferences", PAIR, {"too_long": "split"}, "split is for rows of plain text"),
        ("demonstrations", {"messages": CHAT}, {"too_long": "truncate_left"}, "would break its template"),
    ],
)
def test_what_may_not_be_cut_is_an_error(examples, kind, row, settings, complaint):
    with pytest.raises(DataError, match=rf"corpus\.jsonl:1: .*{complaint}"):
        examples(kind, [row], max_tokens=4, **settings)


@pytest.mark.parametrize(
    ("row", "too_long", "complaint"),
    [
        (PAIR, "drop", "1 too long"),
        (PAIR, "truncate_left", "1 whose prompt or answer leaves no room"),
        (PAIR | {"prompt": "long"}, "truncate_right", "1 whose prompt or answer leaves no room"),
    ],
)
def test_dropped_rows_are_counted_by_reason(examples, row, too_long, complaint):
    with pytest.raises(DataError, match=f"gives no example: of 1 rows were dropped {complaint}"):
        examples("preferences", [row], max_tokens=4, too_long=too_long)


@pytest.mark.parametrize(("length", "limit"), [(11, 4), (10, 4), (9, 4), (5, 2), (4, 3)])
def test_a_split_text_predicts_every_token_but_the_first_once(examples, tokenizer, length, limit):
    text = "abcdefghijk"[:length]
    pieces = examples("demonstrations", [{"text": text}], max_tokens=limit, too_long="split", append_eos=False)
    assert tokenizer.decode([i for piece in pieces for i in piece.answers[0].token_ids]) == text[1:]
    assert all(piece.num_tokens <= limit and piece.row_id == 0 for piece in pieces)
    assert [piece.num_tokens for piece in pieces[:-1]] == [limit] * (len(pieces) - 1)


@pytest.mark.parametrize(("side", "left"), [("truncate_left", "def"), ("truncate_right", "abc")])
def test_one_end_of_a_text_is_kept(examples, tokenizer, side, left):
    (piece,) = examples("demonstrations", [{"text": "abcdef"}], max_tokens=3, too_long=side, append_eos=False)
    assert tokenizer.decode(piece.prompt_ids + piece.answers[0].token_ids) == left


def test_a_cut_conversation_keeps_its_marks(examples):
    (example,) = examples("demonstrations", [{"messages": CHAT + CHAT}], max_tokens=12, too_long="truncate_right")
    (answer,) = example.answers
    assert len(answer.trained) == len(answer.token_ids) == 12 - len(example.prompt_ids)
    assert answer.trained == (True, True, True, False, False)
