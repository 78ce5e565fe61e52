"""A stream cut over context ranks is whole again, and gradients come back once."""

import pytest
import torch

from megarlhf.config.layout import Layout
from megarlhf.parallel.context import held_slices, held_tokens, stream_multiple
from tests.distributed.pool import run_on_ranks


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_every_token_is_held_once_and_work_is_even(cp):
    num_tokens = 12 * 2 * cp
    held = [held_tokens(num_tokens, cp, rank).tolist() for rank in range(cp)]
    assert sorted(place for tokens in held for place in tokens) == list(range(num_tokens))
    assert len({sum(place + 1 for place in tokens) for tokens in held}) == 1, "causal work differs"


def test_the_slices_are_one_from_each_end():
    assert [held_slices(16, 2, rank) for rank in range(2)] == [((0, 4), (12, 16)), ((4, 8), (8, 12))]


def test_streams_are_padded_for_every_kind_of_cut():
    layouts = [Layout(), Layout(tp=2), Layout(tp=2, sp=True), Layout(cp=2), Layout(tp=2, sp=True, cp=3)]
    assert [stream_multiple(layout) for layout in layouts] == [1, 1, 2, 4, 12]


def gather_and_join(rank: int, world_size: int):
    from megarlhf.parallel.context import joined, places_here, whole_stream
    from megarlhf.parallel.groups import build_groups

    group = build_groups(Layout(cp=world_size), world_size).cp
    stream = torch.arange(32.0).reshape(16, 2)
    held = stream[held_tokens(16, world_size, rank)].requires_grad_()
    whole = whole_stream(held, group)
    (whole * (rank + 1)).sum().backward()
    positions = torch.tensor([0, 15, 7, 7, 9, 3])
    mine, places = places_here(positions, 16, group)
    values = held.detach()[places, 0].requires_grad_()
    answer = joined(values, mine, len(positions), group)
    (answer * torch.arange(1.0, 7.0)).sum().backward()
    return torch.equal(whole, stream), held.grad, answer.detach(), torch.stack([mine + 1.0, values.grad])


def test_tokens_are_gathered_in_order_and_results_reach_every_rank():
    for is_whole, gradient, answer, (own, of_own) in run_on_ranks(2, gather_and_join):
        assert is_whole
        assert torch.equal(gradient, torch.full((8, 2), 3.0)), "not the sum of both ranks' gradients"
        assert answer.tolist() == [0.0, 30.0, 14.0, 14.0, 18.0, 6.0]
        assert torch.equal(of_own, own), "the gradient of a joined value is not its own entry's"
