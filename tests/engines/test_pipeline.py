"""Which rows go to which rank and micro-batch: a prompt is computed as seldom as that keeps ranks equally busy."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megarlhf.engines.pipeline import plan_rows
from megarlhf.records.spans import Spans


def spans_of(families: list[tuple[int, list[int]]]) -> Spans:
    """Rows by family: (tokens of the prompt, tokens of each response)."""
    lengths, prompts, numbers = [], [], []
    for prompt, responses in families:
        numbers += [len(lengths)] * len(responses)
        lengths += [prompt + response for response in responses]
        prompts += [prompt] * len(responses)
    return Spans(tuple(lengths), tuple(prompts), tuple(numbers))


def tokens(spans: Spans, rank: list[list[int]]) -> int:
    return sum(spans.num_tokens(rows) for rows in rank)


FAMILIES = st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(0, 20), min_size=1, max_size=9)), max_size=6)


@settings(deadline=None, max_examples=150)
@given(FAMILIES, st.integers(1, 5), st.integers(1, 90))
def test_every_row_is_planned_once_within_the_cap_and_no_rank_is_busier_than_without_sharing(families, dp, cap):
    spans = spans_of(families)
    plan = plan_rows(spans, dp, cap)
    assert sorted(row for rank in plan for rows in rank for row in rows) == list(range(len(spans.lengths)))
    assert len({len(rank) for rank in plan}) == 1 and len(plan) == dp
    for rows in (rows for rank in plan for rows in rank):
        assert spans.num_tokens(rows) <= max(cap, *(spans.lengths[row] for row in rows), 0)
    assert plan == plan_rows(spans, dp, cap)
    unshared = Spans.unshared(spans.lengths)
    alone = plan_rows(unshared, dp, cap)
    assert max(tokens(spans, rank) for rank in plan) <= max(tokens(unshared, rank) for rank in alone)


def test_siblings_stay_together_where_a_micro_batch_has_room():
    spans = spans_of([(50, [10] * 4), (50, [10] * 4)])
    assert plan_rows(spans, 1, 90) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert plan_rows(spans, 2, 4096) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert [len(rows) for rows in plan_rows(spans, 1, 70)[0]] == [2, 2, 2, 2]


def test_a_family_is_cut_where_a_rank_would_have_nothing_to_do():
    spans = spans_of([(50, [10] * 8)])
    assert [[len(rows) for rows in rank] for rank in plan_rows(spans, 4, 4096)] == [[2]] * 4
    assert [tokens(spans, rank) for rank in plan_rows(spans, 2, 4096)] == [90, 90]


def test_siblings_that_a_loss_reads_together_are_never_cut():
    spans = spans_of([(50, [10] * 8), (5, [1, 1])])
    units = [list(range(8)), [8, 9]]
    assert sorted(rows for rank in plan_rows(spans, 2, 60, units) for rows in rank) == units
