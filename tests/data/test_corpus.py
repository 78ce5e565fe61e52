"""Rows of every kind become examples, and every kind of bad row is an error that names its place."""

import logging

import pytest

from megarlhf.config.corpus import Corpus
from megarlhf.data.corpus import attributes_reader
from megarlhf.data.files import MAX_REPORTED
from megarlhf.errors import DataError
from tests import tiny
from tests.data.conftest import write_rows

CHAT = [{"role": "user", "content": "hi"}]
ANSWER = [{"role": "assistant", "content": "yo"}]


def ids(tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode_plain(text))


def test_demonstrations_are_conversations_responses_and_texts(examples, tokenizer):
    rows = [{"messages": CHAT + ANSWER}, {"prompt": "ab", "response": "cd", "id": 7}, {"text": "hello"}]
    chat, answered, text = examples("demonstrations", rows)
    assert (chat.prompt, chat.answers[0].text) == ("u>hi\na>", "yo\n")
    assert (answered.prompt_ids, answered.answers[0].token_ids) == (ids(tokenizer, "ab"), (*ids(tokenizer, "cd"), 0))
    assert (answered.metadata, answered.answers[0].trained) == ({"id": 7}, None)
    assert (text.prompt_ids, text.answers[0].token_ids) == (ids(tokenizer, "h"), (*ids(tokenizer, "ello"), 0))
    assert [example.row_id for example in (chat, answered, text)] == [0, 1, 2]


def test_a_completion_is_a_response(examples):
    """As TRL writes them; where a row has an answer of another name it is metadata like any other key."""
    for kind, grade in (("demonstrations", {}), ("labelled", {"label": True}), ("scored", {"score": 0.5})):
        for prompt, answer in (("ab", "cd"), (CHAT, ANSWER)):
            theirs = examples(kind, [{"prompt": prompt, "completion": answer, **grade}])
            assert theirs == examples(kind, [{"prompt": prompt, "response": answer, **grade}])
    (text,) = examples("demonstrations", [{"text": "ab", "completion": "c"}])
    assert text.metadata == {"completion": "c"}


def test_a_text_begins_with_what_the_tokenizer_puts_there_and_ends_once(examples, tokenizer):
    with_end, without = examples("demonstrations", [{"text": "ab" + tiny.EOS}, {"text": "ab"}])
    assert with_end.answers[0].token_ids == without.answers[0].token_ids == (*ids(tokenizer, "b"), 0)
    (open_end,) = examples("demonstrations", [{"text": "ab"}], append_eos=False)
    assert open_end.answers[0].token_ids == ids(tokenizer, "b") and not open_end.answers[0].finished


def test_pairs_carry_preference_and_margin(examples, tokenizer):
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 2},
        {"prompt": "a", "chosen": "b", "rejected": ""},
    ]
    first, second = examples("preferences", rows)
    assert [(a.text, a.preference, a.margin) for a in first.answers] == [("b", 1.0, 2.0), ("c", 0.0, None)]
    assert [a.token_ids for a in second.answers] == [(*ids(tokenizer, "b"), 0), (0,)]


def test_both_sides_of_a_chat_start_behind_the_same_header(examples, tokenizer):
    rows = [
        {"prompt": CHAT, "chosen": "yo", "rejected": ANSWER[:0] + [{"role": "assistant", "content": "no"}]},
        {"chosen": CHAT + ANSWER, "rejected": CHAT + [{"role": "assistant", "content": "no"}]},
    ]
    first, second = examples("preferences", rows)
    assert first.prompt_ids == second.prompt_ids == tuple(tokenizer.encode_prompt(CHAT))
    assert first.answers == second.answers and first.answers[0].token_ids == (*ids(tokenizer, "yo\n"), 0)


def test_rankings_prefer_small_ranks_and_keep_ties(examples):
    (example,) = examples("preferences", [{"prompt": "a", "responses": ["x", "y", "z"], "ranks": [2, 1, 2]}])
    assert [(answer.text, answer.preference) for answer in example.answers] == [("x", -2.0), ("y", -1.0), ("z", -2.0)]


def test_scores_and_labels(examples):
    scored = examples("scored", [{"prompt": "a", "response": "b", "score": value} for value in (-1.5, 2, True)])
    assert [example.answers[0].score for example in scored] == [-1.5, 2.0, 1.0]
    labelled = examples("labelled", [{"prompt": "a", "response": "b", "label": value} for value in (True, False, 1)])
    assert [example.answers[0].preference for example in labelled] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "row", "complaint"),
    [
        ("demonstrations", {"x": 1}, r"none of them \(its keys are \['x'\]\)"),
        ("demonstrations", {"text": "a", "messages": CHAT}, "this one has messages and text"),
        ("demonstrations", {"text": None}, "text is null"),
        ("demonstrations", {"text": " \n"}, "text is empty or blank"),
        ("demonstrations", {"text": "\ud800"}, "half of a surrogate pair"),
        ("demonstrations", {"messages": "hi"}, "messages is a text"),
        ("demonstrations", {"messages": []}, "messages is empty"),
        ("demonstrations", {"messages": CHAT}, "end with a turn of the user"),
        ("demonstrations", {"messages": ANSWER}, "start with a turn of the assistant"),
        ("demonstrations", {"messages": CHAT + [{"role": "bot", "content": "x"}]}, "role is 'bot'"),
        ("demonstrations", {"prompt": "a", "response": 3}, "response is a number"),
        ("demonstrations", {"prompt": "", "response": "b"}, "prompt is empty or blank"),
        ("demonstrations", {"prompt": None, "response": "b"}, "prompt is null"),
        ("demonstrations", {"response": "b"}, "the row has no prompt"),
        ("preferences", {"prompt": "a", "chosen": "b"}, "the row has no rejected; its keys are"),
        ("preferences", {"prompt": "a", "chosen": "b", "rejected": None}, "rejected is null"),
        ("preferences", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "1"}, "margin is a text"),
        ("preferences", {"prompt": ["a"], "chosen": "b", "rejected": "c"}, r"messages\[0\] is a text"),
        ("preferences", {"prompt": "a", "responses": ["b", "c"], "ranks": [1]}, "ranks is .* at least two"),
        ("preferences", {"prompt": "a", "responses": ["b", "c"], "ranks": [1, 2, 3]}, "2 responses have 3 ranks"),
        ("preferences", {"prompt": "a", "responses": ["b", 1], "ranks": [1, 2]}, r"responses\[1\] is a number"),
        ("preferences", {"prompt": "a", "responses": ["b", "c"], "ranks": [1, "x"]}, r"ranks\[1\] is a text"),
        ("preferences", {"prompt": "a", "responses": ["b", "c"], "ranks": [1, 2], "chosen": "d"}, "has keys of both"),
        ("scored", {"prompt": "a", "response": "b"}, "the row has no score"),
        ("scored", {"prompt": "a", "response": "b", "score": float("nan")}, "score is nan; give a finite"),
        ("scored", {"prompt": "a", "response": "b", "score": 10**400}, "score is 1000"),
        ("scored", {"prompt": "a", "response": "b", "score": -1e39}, r"score is -1e\+39; give a finite"),
        ("labelled", {"prompt": "a", "response": "b", "label": "good"}, "label is 'good'"),
    ],
)
def test_a_bad_row_is_an_error_with_file_and_line(examples, kind, row, complaint):
    with pytest.raises(DataError, match=rf"corpus\.jsonl:1: .*{complaint}"):
        examples(kind, [row])


def test_margins_that_no_row_has_are_an_error(examples):
    """A misspelt key would otherwise give every comparison the margin 0."""
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "d", "margin": 0},
    ]
    assert [example.answers[0].margin for example in examples("margins", rows)] == [None, 0.0]
    with pytest.raises(DataError, match=r"data\.path: no row of .*corpus\.jsonl has a margin; .* algorithm\.margins"):
        examples("margins", [{**rows[0], "margins": 1}])


def test_all_bad_rows_are_reported_at_once_up_to_a_limit(examples):
    with pytest.raises(DataError) as caught:
        examples("scored", [{f"prompt{number}": 1} for number in range(MAX_REPORTED + 3)])
    assert str(caught.value).splitlines()[-1] == "... and 3 more bad lines"


def test_identical_answers_are_dropped_and_counted(examples, caplog):
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "responses": ["b", "c", "b"], "ranks": [1, 2, 3]},
        {"prompt": "a", "responses": ["b", "c", "d"], "ranks": [1, 1, 1]},
    ]
    with caplog.at_level(logging.WARNING):
        pair, ranking = examples("preferences", rows)
    assert (pair.row_id, [a.text for a in ranking.answers]) == (1, ["b", "c"])
    assert "of 4 rows were dropped 1 with identical answers, 1 without a preference" in caplog.text


def test_an_answer_without_a_token_is_dropped_and_counted(examples):
    with pytest.raises(DataError, match="gives no example: of 1 rows were dropped 1 without a token to learn from"):
        examples("demonstrations", [{"prompt": "a", "response": ""}], append_eos=False)


def test_an_empty_file_is_an_error(examples):
    with pytest.raises(DataError, match="data.path: .*corpus.jsonl gives no example: it has no rows"):
        examples("demonstrations", [])


NAMES = ("helpful", "short")


def attributes_of(rows, tmp_path, tokenizer) -> list[tuple]:
    path = write_rows(tmp_path / "scores.jsonl", [{"prompt": "a", "response": "b", **row} for row in rows])
    found = attributes_reader(NAMES)(Corpus(path=str(path)), tokenizer)
    return [example.answers[0].attributes for example in found]


def test_several_scores_are_an_object_a_list_or_keys_of_the_row(tmp_path, tokenizer):
    rows = [
        {"scores": {"short": 1, "helpful": 4.5, "funny": 2}},
        {"scores": {"helpful": 3}},
        {"scores": [None, 2]},
        {"helpful": 1, "short": 0},
        {"scores": {"helpful": None, "short": 0}},
    ]
    found = attributes_of(rows, tmp_path, tokenizer)
    assert found == [(4.5, 1.0), (3.0, None), (None, 2.0), (1.0, 0.0), (None, 0.0)]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"scores": [1]}, "scores has 1 entries; give 2: helpful, short"),
        ({"scores": 3}, "scores is a number"),
        ({"scores": {"helpful": "4"}}, "scores.helpful is a text; give a number"),
        ({"scores": {"helpfulness": 4}}, "none of the scores helpful, short"),
        ({}, "none of the scores helpful, short"),
    ],
)
def test_scores_that_cannot_be_used_are_named(row, words, tmp_path, tokenizer):
    with pytest.raises(DataError, match=f"scores.jsonl:1: .*{words}"):
        attributes_of([row], tmp_path, tokenizer)


def test_an_attribute_that_no_row_has_is_a_mistake(tmp_path, tokenizer):
    with pytest.raises(DataError, match="no row of .* has a score for short; correct algorithm.attributes"):
        attributes_of([{"scores": {"helpful": 1}}], tmp_path, tokenizer)
