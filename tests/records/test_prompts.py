"""Claims about samples of prompts."""

from megarlhf.records import Prompt, siblings


def test_siblings_are_consecutive_and_every_prompt_appears_n_times():
    prompts = [Prompt(row_id=7, token_ids=(1,), text="a"), Prompt(row_id=3, token_ids=(2,), text="b")]
    rows = siblings(prompts, 3)
    assert "".join(row.prompt.text for row in rows) == "aaabbb"
    assert [row.group for row in rows] == [0, 0, 0, 1, 1, 1]
    assert [row.sample for row in rows] == [0, 1, 2, 0, 1, 2]


def test_the_same_text_twice_is_two_groups():
    prompts = [Prompt(row_id=row, token_ids=(1,), text="a") for row in (0, 1)]
    assert [row.group for row in siblings(prompts, 2)] == [0, 0, 1, 1]
