"""Examples become rows whose mask follows the stated rule; a step's batch depends on the step alone."""

import pytest
import torch

from megarlhf.config.corpus import Negatives
from megarlhf.data.batches import CorpusBatches, corpus_experience
from megarlhf.data.examples import Answer, Example
from megarlhf.data.order import PromptOrder


def answer(*token_ids: int, **says) -> Answer:
    return Answer(token_ids, "", finished=token_ids[-1] == 0, **says)


def pair(row: int, prompt, chosen, rejected, margin=None) -> Example:
    answers = (answer(*chosen, preference=1.0, margin=margin), answer(*rejected, preference=0.0))
    return Example(row, tuple(prompt), "", answers)


PAIRS = [pair(5, [1, 2], [3, 4, 0], [3, 7, 8, 0]), pair(6, [9], [3, 0], [4], margin=0.5)]


def tokens_in(mask: torch.Tensor) -> list[list[int]]:
    """Positions of the tokens that the mask selects, row by row."""
    return [[t + 1 for t, yes in enumerate(row) if yes] for row in mask.tolist()]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("response", [[2, 3, 4], [2, 3, 4, 5], [1, 2], [1]]),
        ("all", [[1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2], [1]]),
        ("last", [[4], [5], [2], [1]]),
        ("divergence", [[3, 4], [3, 4, 5], [1, 2], [1]]),
    ],
)
def test_each_rule_marks_the_same_kind_of_token_in_every_row(rule, expected):
    assert tokens_in(corpus_experience(PAIRS, rule).mask) == expected


def test_all_four_rows_of_two_pairs_mask_their_prompt():
    experience = corpus_experience(PAIRS, "response")
    logits = torch.randn(*experience.tokens.shape, 11, generator=torch.Generator().manual_seed(0))

    def loss(values: torch.Tensor) -> torch.Tensor:
        logp = values[:, :-1].log_softmax(-1).gather(-1, experience.tokens[:, 1:, None])[..., 0]
        return logp[experience.mask].sum()

    elsewhere = logits.clone()
    for row, num_prompt in enumerate([2, 2, 1, 1]):
        assert not experience.mask[row, : num_prompt - 1].any() and experience.mask[row, num_prompt - 1]
        elsewhere[row, : num_prompt - 1] = 99.0
    assert torch.equal(loss(logits), loss(elsewhere))


def test_tool_turns_are_not_trained():
    """Prompt of 3, answer of 2, tool's result of 2, answer of 1."""
    trained = (True, True, False, False, True)
    example = Example(0, (1, 2, 3), "", (answer(4, 5, 6, 7, 0, trained=trained),))
    assert tokens_in(corpus_experience([example], "response").mask) == [[3, 4, 7]]


def test_an_answer_that_begins_the_other_is_read_at_its_last_token():
    experience = corpus_experience([pair(0, [1], [2, 3], [2, 3, 4])], "divergence")
    assert tokens_in(experience.mask) == [[2], [3]]


def test_what_the_data_set_says_reaches_the_rows():
    experience = corpus_experience(PAIRS, "last")
    assert experience.preference.tolist() == [1, 0, 1, 0] and experience.margin.tolist() == [0, 0, 0.5, 0]
    assert experience.score is None and experience.finished.tolist() == [True, True, True, False]
    assert experience.group.tolist() == [0, 0, 1, 1] and experience.row_id.tolist() == [5, 5, 6, 6]
    scored = corpus_experience([Example(0, (1,), "", (answer(2, score=0.25),))], "last")
    assert scored.score.tolist() == [0.25] and scored.preference is None and scored.margin is None


def test_comparisons_have_a_margin_in_every_batch():
    assert corpus_experience(PAIRS[:1], "last").margin.tolist() == [0, 0]


def test_a_resumed_run_goes_on_with_the_same_batches_and_spoilt_answers():
    def batches() -> CorpusBatches:
        examples = [pair(row, [1, 2], [3, row + 4, 5, 0], [6, 0]) for row in range(5)]
        return CorpusBatches(examples, PromptOrder(5, 3, seed=7), "last", Negatives(share=0.5))

    walked = batches()
    earlier = [walked.next_batch(step).tokens for step in range(6)]
    assert all(torch.equal(batches().next_batch(step).tokens, earlier[step]) for step in (5, 0, 3))


def test_without_negatives_the_examples_are_used_as_they_are():
    source = CorpusBatches(PAIRS, PromptOrder(2, 2, shuffle=False), "last")
    assert torch.equal(source.next_batch(3).tokens, corpus_experience(PAIRS, "last").tokens)
