"""Joined batches keep every row and never merge groups of different parts."""

import torch

from megarlhf.records.experience import Experience
from megarlhf.records.joining import join


def part(prompt: int, response: int, groups: list[int]) -> Experience:
    rows = len(groups)
    batch = Experience.from_completions(
        [[1] * prompt] * rows,
        [[2] * response] * rows,
        [[-0.5] * response] * rows,
        row_id=range(rows),
        group=groups,
        finished=[True] * rows,
        prompts=["p"] * rows,
        responses=["r"] * rows,
        metadata=[{}] * rows,
    )
    return batch.replace(score=torch.arange(rows, dtype=torch.float32))


def test_rows_of_different_widths_keep_their_tokens_and_masks():
    one, two = part(1, 2, [0, 0]), part(3, 5, [4, 5, 5])
    both = join([one, two])
    assert both.tokens.shape == (5, 8) and both.lengths.tolist() == [3, 3, 8, 8, 8]
    assert both.mask.sum(1).tolist() == [2, 2, 5, 5, 5]
    assert torch.equal(both.logp_rollout[:2, :2], one.logp_rollout[:, :2])
    assert both.score.tolist() == [0, 1, 0, 1, 2] and len(both.prompts) == 5
    assert both.value is None


def test_groups_of_different_parts_stay_apart():
    assert join([part(1, 1, [0, 0]), part(1, 1, [0, 1]), part(1, 1, [7])]).group.tolist() == [0, 0, 1, 2, 3]
