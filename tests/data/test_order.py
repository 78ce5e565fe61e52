"""The order of prompts is a pure function of (seed, step) that uses every prompt once an epoch."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarlhf.data.order import PromptOrder, occurrences
from megarlhf.errors import DataError

sizes = st.integers(1, 30)


@given(num_prompts=sizes, batch_size=sizes, seed=st.integers(-5, 10**12), shuffle=st.booleans())
def test_every_epoch_uses_every_prompt_once(num_prompts, batch_size, seed, shuffle):
    order = PromptOrder(num_prompts, batch_size, seed, shuffle)
    stream = [index for step in range(num_prompts * 3) for index in order.batch(step)]
    assert all(len(order.batch(step)) == batch_size for step in range(3))
    for epoch in range(3):
        assert Counter(stream[epoch * num_prompts : (epoch + 1) * num_prompts]) == Counter(range(num_prompts))


def test_a_step_needs_no_earlier_step():
    walked = PromptOrder(10, 4, seed=3)
    earlier = [walked.batch(step) for step in range(20)]
    assert PromptOrder(10, 4, seed=3).batch(17) == earlier[17]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(PromptOrder(50, 50, seed).batch(epoch)) for seed in (0, 1, 12) for epoch in (0, 1, 2)}
    assert len(orders) == 9


def test_without_shuffling_the_file_order_is_kept():
    order = PromptOrder(5, 3, shuffle=False)
    assert [order.batch(step) for step in range(3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_fewer_prompts_than_a_batch_are_used_again():
    assert PromptOrder(2, 5, shuffle=False).batch(1) == [1, 0, 1, 0, 1]


def test_nothing_to_order_is_an_error():
    with pytest.raises(DataError, match="out of 0 rows"):
        PromptOrder(0, 4)


def test_uses_of_one_prompt_are_told_apart():
    assert occurrences([7, 3, 7, 7, 3]) == [0, 0, 1, 2, 1]


@given(num_prompts=sizes, batch_size=sizes)
def test_epochs_count_how_often_a_row_was_used_before(num_prompts, batch_size):
    order = PromptOrder(num_prompts, batch_size)
    used = Counter()
    for step in range(4):
        for index, epoch in zip(order.batch(step), order.epochs(step), strict=True):
            assert epoch == used[index]
            used[index] += 1


def test_batches_run_on_over_the_ends_of_epochs():
    """1000 rows in batches of 128 for 3 epochs are 23 whole batches, not 3 times 7."""
    assert PromptOrder(1000, 128).steps_of(3) == 23
    assert PromptOrder(5, 32).steps_of(1) == 1
