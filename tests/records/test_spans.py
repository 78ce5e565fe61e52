"""Claims about prompts that several rows of a stream have in common: nothing is left out, mixed up or there twice."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarlhf.records import Experience, PackedRows, pack_rows
from megarlhf.records.spans import Spans


def contexts(packed: PackedRows) -> list[list[int]]:
    """What each token of the stream sees, itself last: what its segment continues, then the segment up to it."""
    ids, starts = packed.input_ids[0].tolist(), packed.cu_seqlens.tolist()
    prefixes = packed.prefixes + ((0, 0),) * (len(starts) - 1 - len(packed.prefixes))
    return [
        ids[before : before + length] + ids[start : place + 1]
        for start, stop, (before, length) in zip(starts, starts[1:], prefixes, strict=False)
        for place in range(start, stop)
    ]


@st.composite
def experiences(draw) -> Experience:
    """Rows of few groups, with prompts of 1 to 4 tokens of two kinds, empty responses, and some tokens masked."""
    count = draw(st.integers(1, 7))
    prompts = [draw(st.lists(st.integers(1, 2), min_size=1, max_size=4)) for _ in range(3)]
    chosen = [prompts[draw(st.integers(0, 2))] for _ in range(count)]
    responses = [draw(st.lists(st.integers(3, 9), max_size=4)) for _ in range(count)]
    rows = Experience.from_completions(
        chosen,
        responses,
        None,
        row_id=range(count),
        group=[draw(st.integers(0, 1)) for _ in range(count)],
        finished=[True] * count,
    )
    kept = torch.tensor(draw(st.lists(st.booleans(), min_size=rows.mask.numel(), max_size=rows.mask.numel())))
    return rows.replace(mask=rows.mask & kept.view(rows.mask.shape))


@settings(deadline=None, max_examples=150)
@given(experiences(), st.randoms(), st.sampled_from(["before", "rows"]), st.booleans(), st.integers(1, 5))
def test_every_valid_token_is_predicted_once_from_what_is_before_it_in_its_row(rows, random, reads, shares, multiple):
    order = list(range(rows.num_rows))
    random.shuffle(order)
    spans = Spans.of(rows, reads, shares_prompts=shares)
    packed = pack_rows(rows, order, multiple, spans)
    seen, tokens = contexts(packed), rows.tokens.tolist()
    valid = [(row, t) for row in order for t in range(rows.mask.shape[1]) if rows.mask[row, t]]
    assert [seen[place] for place in packed.logit_positions] == [tokens[row][: t + 1] for row, t in valid]
    assert packed.targets.tolist() == [tokens[row][t + 1] for row, t in valid]
    assert list(packed.num_valid) == [int(rows.mask[row].sum()) for row in order]
    for place, (row, t) in zip(packed.target_positions.tolist(), valid, strict=True):
        assert seen[place] == tokens[row][: t + 2] if place >= 0 else reads == "before"
    if reads == "rows":
        assert [seen[place] for place in packed.last_positions] == [tokens[row][: rows.lengths[row]] for row in order]
    num_real = len(seen) - packed.num_padding
    assert packed.position_ids[0, :num_real].tolist() == [len(context) - 1 for context in seen[:num_real]]
    assert len(seen) % multiple == 0 and packed.num_padding <= max(multiple - 1, multiple * (num_real == 0))
    assert num_real == spans.num_tokens(order)


@settings(deadline=None, max_examples=100)
@given(experiences(), st.sampled_from(["before", "rows"]))
def test_no_more_is_computed_than_is_read(rows, reads):
    """Each prompt of a group once, and no token behind the last of its row that is read."""
    spans, wanted, prompts = Spans.of(rows, reads, shares_prompts=True), 0, set()
    for row in range(rows.num_rows):
        valid, prompt = rows.mask[row].nonzero()[:, 0].tolist(), int(rows.prompt_lengths[row])
        end = int(rows.lengths[row]) if reads == "rows" else max(valid, default=-1) + 1
        if end:
            prompts.add((int(rows.group[row]), tuple(rows.tokens[row, :prompt].tolist())))
            wanted += end - prompt
    assert spans.num_tokens(range(rows.num_rows)) == wanted + sum(len(prompt) for _, prompt in prompts)


def test_prompts_that_differ_in_a_token_or_belong_to_other_groups_are_not_shared():
    rows = Experience.from_completions(
        [[5, 6, 7], [5, 6, 8], [5, 6, 7], [5, 6, 7]],
        [[1, 2], [1, 2], [3, 4], [1, 2]],
        None,
        row_id=range(4),
        group=[0, 0, 0, 1],
        finished=[True] * 4,
    )
    spans = Spans.of(rows, "rows", shares_prompts=True)
    assert spans.families == (0, 1, 0, 3)
    packed = pack_rows(rows, range(4), spans=spans)
    assert packed.input_ids.tolist() == [[5, 6, 7, 1, 2, 5, 6, 8, 1, 2, 3, 4, 5, 6, 7, 1, 2]]
    assert packed.prefixes == ((0, 0), (0, 0), (0, 3), (0, 0))
    assert packed.logit_positions.tolist() == [2, 3, 7, 8, 2, 10, 14, 15]
    assert packed.target_positions.tolist() == [3, 4, 8, 9, 10, 11, 15, 16]
