"""Claims about the flat batch of valid tokens."""

import pytest
import torch

from megarlhf.records import Denominators, Experience, TokenBatch, pack_rows


def batch() -> Experience:
    experience = Experience.from_completions(
        [[1], [2, 3]], [[4, 5], [6]], [[-1.0, -2.0], [-3.0]], row_id=[0, 1], group=[0, 1], finished=[False, True]
    )
    return experience.replace(logp_start=torch.where(experience.mask, experience.logp_rollout - 0.5, 9.0))


def test_only_valid_tokens_are_kept_in_row_major_order():
    tokens = TokenBatch.from_experience(batch())
    assert tokens.row.tolist() == [0, 0, 1] and tokens.num_rows == 2 and tokens.num_tokens == 3
    assert tokens.logp_old.tolist() == [-1.5, -2.5, -3.5] and tokens.logp_rollout.tolist() == [-1.0, -2.0, -3.0]
    assert tokens.advantage is None
    assert tokens.to(torch.device("cpu")).row.tolist() == tokens.row.tolist()


def test_its_order_is_that_of_the_packed_stream():
    experience = batch()
    for rows in ([0, 1], [1, 0]):
        packed = pack_rows(experience, rows)
        predicted = experience.tokens[:, 1:]
        tokens = TokenBatch.from_experience(experience.select(rows))
        assert torch.cat([predicted[row][experience.mask[row]] for row in rows]).tolist() == packed.targets.tolist()
        assert tokens.row.tolist() == [i for i, count in enumerate(packed.num_valid) for _ in range(count)]


def test_fields_of_another_length_are_refused():
    with pytest.raises(AssertionError, match=r"value: shape \[2\] instead of \[3\]"):
        TokenBatch(row=torch.zeros(3, dtype=torch.int64), num_rows=1, value=torch.zeros(2))


def test_rows_keep_their_group_and_what_was_said_about_them():
    rows = batch().replace(
        group=torch.tensor([7, 3]), preference=torch.tensor([1.0, 0.0]), margin=torch.tensor([0.5, 0.0])
    )
    tokens = TokenBatch.from_experience(rows)
    assert tokens.group.tolist() == [1, 0] and tokens.finished.tolist() == [False, True]
    assert tokens.preference.tolist() == [1, 0] and tokens.margin.tolist() == [0.5, 0] and tokens.score is None
    with pytest.raises(AssertionError, match=r"margin: shape \[3\] instead of \[2\]"):
        TokenBatch(row=torch.zeros(3, dtype=torch.int64), num_rows=2, margin=torch.zeros(3))


def test_an_empty_micro_batch_has_no_tokens_and_no_groups():
    tokens = TokenBatch.from_experience(batch().select([]))
    assert tokens.num_tokens == tokens.num_rows == 0 and tokens.group.tolist() == []


def test_denominators_count_the_whole_minibatch():
    rows = batch()
    assert Denominators.of(rows) == Denominators(tokens=3.0, rows=2.0, groups=2.0)
    assert Denominators.of(rows.replace(group=torch.tensor([4, 4]))) == Denominators(3.0, 2.0, 1.0)
    assert Denominators.of(rows.replace(mask=rows.mask & False)) == Denominators(0.0, 0.0, 0.0)
