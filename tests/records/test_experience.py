"""Claims about the batch record: what it accepts, what it refuses and how its rows move."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from megarlhf.records import Experience
from megarlhf.records.experience import flat_ids, flat_numbers, response_mask, scatter_flat, scatter_rows
from megarlhf.records.texts import DecodedTexts


def three_rows() -> Experience:
    return Experience.from_completions(
        [[1, 2], [3], [4, 5, 6]],
        [[7, 8], [], [9]],
        [[-0.5, -0.25], [], [-1.0]],
        row_id=[10, 11, 12],
        group=[0, 0, 1],
        finished=[True, False, False],
        prompts=("a", "b", "c"),
        responses=("x", "", "z"),
        metadata=({"answer": 1}, {}, {"answer": 3}),
    )


def test_sampled_ids_are_kept_token_for_token_with_their_stop_token():
    experience = three_rows()
    assert experience.tokens.tolist() == [[1, 2, 7, 8], [3, 0, 0, 0], [4, 5, 6, 9]]
    assert experience.lengths.tolist() == [4, 1, 4]
    assert experience.tokens[:, 1:][experience.mask].tolist() == [7, 8, 9]
    assert experience.logp_rollout[experience.mask].tolist() == [-0.5, -0.25, -1.0]
    assert experience.num_rows == 3 and experience.num_tokens == 3


def test_position_t_speaks_about_token_t_plus_1():
    assert three_rows().mask.tolist() == [[False, True, True], [False, False, False], [False, False, True]]


def test_a_first_token_stop_is_a_response_of_length_1_and_an_empty_one_has_no_token():
    stop = Experience.from_completions([[1, 2]], [[9]], None, row_id=[0], group=[0], finished=[True])
    assert stop.mask.sum() == 1 and stop.logp_rollout is None
    empty = Experience.from_completions([[1, 2]], [[]], [[]], row_id=[0], group=[0], finished=[False])
    assert empty.mask.sum() == 0 and empty.logp_rollout.tolist() == [[0.0]]
    shortest = Experience.from_completions([[1]], [[]], [[]], row_id=[0], group=[0], finished=[False])
    assert shortest.tokens.shape == (1, 2)


def test_rows_move_together_with_their_texts():
    experience = three_rows().replace(score=torch.tensor([1.0, 2.0, 3.0]))
    chosen = experience.select([2, 0])
    assert chosen.tokens.tolist() == [[4, 5, 6, 9], [1, 2, 7, 8]]
    assert chosen.score.tolist() == [3.0, 1.0]
    assert chosen.row_id.tolist() == [12, 10] and chosen.group.tolist() == [1, 0]
    assert chosen.responses == ("z", "x") and chosen.metadata == ({"answer": 3}, {"answer": 1})
    assert chosen.value is None
    assert experience.select(torch.tensor([], dtype=torch.int64)).num_rows == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"value": torch.zeros(3, 4)}, r"value: shape \[3, 4\] instead of \[3, 3\]"),
        ({"value": torch.zeros(3, 3, dtype=torch.float64)}, r"value: torch.float64 instead of torch.float32"),
        ({"preference": torch.zeros(2)}, r"preference: shape \[2\] instead of \[3\]"),
        ({"margin": torch.zeros(3, 3)}, r"margin: shape \[3, 3\] instead of \[3\]"),
        ({"score": torch.zeros(2)}, r"score: shape \[2\] instead of \[3\]"),
        ({"score": torch.tensor([1, 2, 3])}, r"score: torch.int64 instead of torch.float32"),
        ({"tokens": torch.zeros(4, dtype=torch.int64)}, r"tokens: shape \[4\] instead of \[B, S\]"),
        ({"responses": ("x",)}, r"responses: 1 entries for 3 rows"),
        ({"lengths": torch.tensor([5, 1, 4])}, r"lengths: rows \[0\] are not within"),
        ({"prompt_lengths": torch.tensor([2, 0, 3])}, r"prompt_lengths: a prompt without a token"),
        ({"mask": torch.ones(3, 3, dtype=torch.bool)}, r"mask: rows \[0, 1, 2\] mark tokens outside"),
    ],
)
def test_a_wrong_field_is_refused_with_its_name(changes, words):
    with pytest.raises(AssertionError, match=words):
        three_rows().replace(**changes)


def test_a_missing_field_names_the_stage_that_fills_it():
    with pytest.raises(AssertionError, match="value .filled by the critic's scorer.*score .filled by the reward"):
        three_rows().require(["logp_rollout", "value", "score"])
    three_rows().require(["logp_rollout", "responses"])


def test_numbers_per_token_must_fit_the_mask():
    with pytest.raises(AssertionError, match=r"\[2, 1, 1\] differ from the valid tokens per row \[2, 0, 1\]"):
        scatter_rows([[1.0, 2.0], [3.0], [4.0]], three_rows().mask)


def test_tool_tokens_may_be_holes_in_the_mask():
    """Prompt 3, response 2, tool output 2, response 1."""
    mask = torch.tensor([[False, False, True, True, False, False, True]])
    rows = Experience.from_completions(
        [[1, 2, 3]], [[4, 5, 6, 7, 8]], None, row_id=[0], group=[0], finished=[False]
    ).replace(mask=mask)
    assert rows.tokens[:, 1:][rows.mask].tolist() == [4, 5, 8]


PROMPTS = some.lists(some.integers(0, 99), min_size=1, max_size=5)
ROWS = some.lists(some.tuples(PROMPTS, some.lists(some.integers(0, 99), max_size=5)), max_size=6)


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_flat_ids_land_where_a_loop_over_rows_puts_them(rows):
    """Ragged rows, responses without a token, and no rows at all."""
    prompts, responses = [prompt for prompt, _ in rows], [response for _, response in rows]
    of_rows = {name: torch.arange(len(rows)) for name in ("row_id", "group")}
    record = Experience.from_flat(
        flat_ids(prompts).to(torch.int32),
        torch.tensor([len(row) for row in prompts], dtype=torch.int64),
        flat_ids(responses).to(torch.int32),
        torch.tensor([len(row) for row in responses], dtype=torch.int64),
        finished=torch.zeros(len(rows), dtype=torch.bool),
        **of_rows,
    )
    width = max([2, *(len(prompt) + len(response) for prompt, response in rows)])
    assert record.tokens.shape == (len(rows), width) and record.mask.shape == (len(rows), width - 1)
    for row, (prompt, response) in enumerate(rows):
        text = prompt + response
        assert record.tokens[row].tolist() == text + [0] * (width - len(text))
        assert record.mask[row].tolist() == [len(prompt) <= t + 1 < len(text) for t in range(width - 1)]
    assert torch.equal(record.mask, response_mask(record.lengths, record.prompt_lengths, width - 1))


def test_numbers_end_to_end_land_where_numbers_by_row_do():
    mask = torch.tensor([[False, True, True], [False, False, False], [True, False, True]])
    rows = [[1.1, 2.2], [], [3.3, 4.4]]
    by_row = torch.zeros(3, 3)
    for place, numbers in zip(by_row, rows, strict=True):
        place[mask[rows.index(numbers)]] = torch.tensor(numbers)
    assert torch.equal(scatter_flat(flat_numbers(rows), mask), by_row)
    assert torch.equal(scatter_rows([torch.tensor(numbers) for numbers in rows], mask), by_row)
    with pytest.raises(AssertionError, match=r"\[3\] numbers for 4 valid tokens"):
        scatter_flat(torch.zeros(3), mask)


def test_an_unknown_field_is_refused():
    with pytest.raises(AssertionError, match="no such fields: .'rewards'"):
        three_rows().replace(rewards=torch.zeros(3))


def test_texts_are_decoded_when_they_are_read():
    asked = []

    def decode(ids: list[int]) -> str:
        asked.append(ids)
        return " ".join(map(str, ids))

    record = three_rows()
    texts = DecodedTexts(decode, record.tokens, record.prompt_lengths, record.lengths, torch.arange(3))
    record = record.replace(responses=texts)
    chosen = record.select([2, 0])
    assert asked == [] and len(chosen.responses) == 2
    assert chosen.responses[0] == "9" and chosen.responses[-1] == "7 8" and asked == [[9], [7, 8]]
    assert tuple(record.responses) == ("7 8", "", "9") and record.responses[1:] == ("", "9")
