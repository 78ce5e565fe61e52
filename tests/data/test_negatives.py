"""Spoilt answers differ from good ones in the stated way only, and depend on (seed, epoch, row) only."""

import pytest

from megarlhf.config.corpus import Negatives
from megarlhf.data.examples import Answer, Example
from megarlhf.data.negatives import spoil


def example(row: int, *ranked: tuple[int, ...]) -> Example:
    """A ranking, best answer first."""
    answers = tuple(Answer(ids, "", ids[-1] == 0, preference=-float(at)) for at, ids in enumerate(ranked, start=1))
    return Example(row, (1,), "", answers)


CORPUS = [example(row, (10 + row, 20 + row, 30 + row, 0), (5, 0), (6, 0)) for row in range(8)]


def spoilt_answers(kind: str, corpus=CORPUS, max_tokens: int = 50) -> list[Answer]:
    settings = Negatives(share=1.0, kinds=(kind,))
    found = [spoil(one, corpus, settings, max_tokens, seed=0, epoch=epoch) for one in corpus for epoch in range(10)]
    pairs = [one.answers for one in found if len(one.answers) == 2]
    assert all((best.preference, worse.preference) == (1.0, 0.0) for best, worse in pairs)
    return [worse for _, worse in pairs]


def test_another_prompts_best_answer():
    best = {one.answers[0].token_ids for one in CORPUS}
    found = spoilt_answers("shuffled")
    assert {answer.token_ids for answer in found} == best and all(answer.finished for answer in found)


def test_a_truncated_answer_is_a_true_beginning_with_the_same_end():
    for answer in spoilt_answers("truncated"):
        whole = CORPUS[answer.token_ids[0] - 10].answers[0].token_ids
        assert answer.token_ids in {whole[:1] + (0,), whole[:2] + (0,)}


def test_a_repeated_answer_goes_on_with_its_own_tail():
    for answer in spoilt_answers("repeated"):
        whole = CORPUS[answer.token_ids[0] - 10].answers[0].token_ids[:-1]
        content, tail = answer.token_ids[:3], answer.token_ids[3:-1]
        period = next(size for size in (1, 2, 3) if tail[:size] == whole[-size:])
        assert content == whole and all(tail[at] == whole[-period:][at % period] for at in range(len(tail)))
        assert len(tail) >= 3 and answer.token_ids[-1] == 0


def test_no_row_gets_longer_than_allowed():
    assert all(len(answer.token_ids) <= 5 for answer in spoilt_answers("repeated", max_tokens=6))


def test_an_example_stays_when_nothing_can_be_spoilt():
    short = [example(0, (7, 0), (8, 0))]
    for kind in ("shuffled", "truncated"):
        assert spoil(short[0], short, Negatives(1.0, (kind,)), 9, seed=0, epoch=0) == short[0]


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.25, 150, 250), (1.0, 800, 800)])
def test_the_share_is_kept_and_drawn_anew_every_epoch(share, least, most):
    settings = Negatives(share=share)
    chosen = {
        (one.row_id, epoch)
        for one in CORPUS
        for epoch in range(100)
        if spoil(one, CORPUS, settings, 50, seed=1, epoch=epoch) != one
    }
    assert least <= len(chosen) <= most
