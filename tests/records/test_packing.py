"""Claims about micro-batches of packed rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarlhf.records import Experience, in_input_order, pack, pack_rows


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 60))
def test_every_row_is_packed_once_within_the_cap(lengths, cap):
    batches = pack(lengths, cap)
    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    for rows in batches:
        assert rows == sorted(rows)
        assert sum(lengths[row] for row in rows) <= cap or len(rows) == 1
    assert batches == pack(lengths, cap)


def test_a_row_longer_than_the_cap_is_alone():
    assert [2] in pack([3, 4, 50, 2, 1], 10)


def test_micro_batches_are_few_and_even():
    lengths = [5, 1, 4, 2]
    assert sorted(sum(lengths[row] for row in rows) for rows in pack(lengths, 6)) == [6, 6]
    lengths = [10] * 12
    assert [len(rows) for rows in pack(lengths, 50)] == [4, 4, 4]
    assert pack([95] * 5, 100) == [[0], [1], [2], [3], [4]]
    assert pack([], 10) == []


def test_results_return_to_input_order():
    lengths = [5, 1, 4, 2]
    batches = pack(lengths, 6)
    results = [[lengths[row] * 10 for row in rows] for rows in batches]
    assert in_input_order(batches, results) == [50, 10, 40, 20]
    with pytest.raises(AssertionError, match="every row once"):
        in_input_order([[0, 0]], [[1, 2]])


def rows_of(*shapes: tuple[int, int]) -> Experience:
    """Rows of (prompt length, response length) with distinct token ids 1, 2, ..."""
    counter = iter(range(1, 10_000))
    prompt_ids, response_ids = [], []
    for prompt_length, response_length in shapes:
        prompt_ids.append([next(counter) for _ in range(prompt_length)])
        response_ids.append([next(counter) for _ in range(response_length)])
    count = list(range(len(shapes)))
    return Experience.from_completions(
        prompt_ids, response_ids, None, row_id=count, group=count, finished=[False] * len(count)
    )


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=6), st.integers(1, 8), st.randoms()
)
def test_the_stream_equals_a_slow_loop(shapes, multiple, random):
    experience = rows_of(*shapes)
    rows = list(range(len(shapes)))
    random.shuffle(rows)
    packed = pack_rows(experience, rows, multiple)
    ids, positions, wanted, targets, last = [], [], [], [], []
    for row in rows:
        length = int(experience.lengths[row])
        for t in range(length):
            if t + 1 < length and bool(experience.mask[row, t]):
                wanted.append(len(ids))
                targets.append(int(experience.tokens[row, t + 1]))
            ids.append(int(experience.tokens[row, t]))
            positions.append(t)
        last.append(len(ids) - 1)
    stream = packed.input_ids[0].tolist()
    assert len(stream) % multiple == 0 and len(stream) - len(ids) < multiple
    assert stream[: len(ids)] == ids and packed.position_ids[0, : len(ids)].tolist() == positions
    assert packed.logit_positions.tolist() == wanted and packed.targets.tolist() == targets
    assert packed.last_positions.tolist() == last
    assert int(packed.cu_seqlens[-1]) == len(stream) and packed.cu_seqlens.dtype == torch.int32
    assert packed.max_seqlen == int(packed.cu_seqlens.diff().max())


def test_padding_is_a_row_of_its_own_that_is_never_read():
    packed = pack_rows(rows_of((2, 1), (1, 1)), [0, 1], multiple=4)
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert packed.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert packed.logit_positions.tolist() == [1, 3] and packed.targets.tolist() == [3, 5]
    assert packed.last_positions.tolist() == [2, 4]


def test_scores_are_read_at_the_last_token_whatever_the_padding_id():
    """A row that ends in id 0, the padding id of the record, keeps its last token."""
    experience = Experience.from_completions(
        [[5, 0], [6]], [[0], [7, 7, 7]], None, row_id=[0, 1], group=[0, 1], finished=[True, False]
    )
    assert pack_rows(experience, [0, 1]).last_positions.tolist() == [2, 6]


def test_flat_results_split_into_rows_again():
    packed = pack_rows(rows_of((2, 2), (1, 0), (1, 1)), [2, 1, 0])
    values = torch.arange(3)
    assert [part.tolist() for part in packed.split(values)] == [[0], [], [1, 2]]


def test_an_empty_micro_batch_is_refused():
    with pytest.raises(AssertionError, match="at least one row"):
        pack_rows(rows_of((1, 1)), [])


def packed_slowly(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """The rule of `pack`, looking at every micro-batch for every row."""
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    alone = [[row] for row in longest_first if lengths[row] >= max_tokens]
    others = [row for row in longest_first if lengths[row] < max_tokens]
    fitted: list[list[int]] = []
    for row in others:
        fitting = [rows for rows in fitted if sum(lengths[i] for i in rows) + lengths[row] <= max_tokens]
        fitting[0].append(row) if fitting else fitted.append([row])
    even: list[list[int]] = [[] for _ in fitted]
    for row in others:
        min(even, key=lambda rows: sum(lengths[i] for i in rows)).append(row)
    is_even = all(sum(lengths[i] for i in rows) <= max_tokens for rows in even)
    return sorted(sorted(rows) for rows in alone + (even if is_even else fitted))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 45), max_size=40), st.integers(1, 40))
def test_micro_batches_are_those_of_the_slow_rule(lengths, max_tokens):
    assert pack(lengths, max_tokens) == packed_slowly(lengths, max_tokens)
