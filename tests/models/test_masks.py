import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarlhf.models.masks import Masks

ASKED = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.sampled_from([None, 1, 3, 12])), min_size=1)


@settings(deadline=None, max_examples=40)
@given(ASKED)
def test_every_mask_is_what_it_would_be_alone_and_begins_at_an_aligned_place(asked):
    masks = Masks()
    for before, num_queries, window in asked:
        mask = masks.causal(before, num_queries, window, torch.zeros(1))
        assert mask.shape == (num_queries, before + num_queries)
        seen = [
            [key for key in range(before + num_queries) if 0 <= before + query - key < (window or 10**6)]
            for query in range(num_queries)
        ]
        assert [(row == 0).nonzero()[:, 0].tolist() for row in mask] == seen
        assert (mask[mask != 0] == -torch.inf).all()
        assert mask.stride(1) == 1 and mask.stride(0) % 8 == 0 and mask.storage_offset() % 8 == 0
