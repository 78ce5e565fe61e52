"""Sums over shards: every rank gets the same bits, whichever shard it holds."""

import torch

from megarlhf.algorithms.moments import RunningMoments, moments, spread
from megarlhf.config.layout import Layout
from megarlhf.records.shards import WHOLE, Shard
from tests.distributed.pool import run_on_ranks


def on_ranks(rank: int, world_size: int, layout: Layout, ranks: list[list[int]]) -> tuple:
    from megarlhf.parallel.groups import build_groups

    groups = build_groups(layout, world_size, ranks)
    shard = groups.shard
    own = torch.randn(40, generator=torch.Generator().manual_seed(1)).view(4, 10)[shard.part(4)]
    mask = own > -0.5
    over = spread(own, shard)
    return (
        (shard.number, shard.count, groups.rows.size(), groups.rows.rank(), list(shard.part(5))),
        shard.sum(own.sum(0)),
        shard.largest(own.amax()),
        (over.count, over.mean, over.squares),
        moments(own, mask, shard),
        RunningMoments(3.0, 1.0, 2.0).seen(own, shard),
        shard.objects(rank),
    )


def test_shards_of_two_ranks_on_four():
    found = run_on_ranks(4, on_ranks, Layout(), [[0, 2], [1, 3]])
    assert [one[0] for one in found] == [
        (0, 2, 2, 0, [0, 1]), (1, 2, 2, 0, [2, 3, 4]), (0, 2, 2, 1, [0, 1]), (1, 2, 2, 1, [2, 3, 4])
    ]  # fmt: skip
    assert [one[6] for one in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    everything = torch.randn(40, generator=torch.Generator().manual_seed(1)).view(4, 10)
    for one in found:
        assert torch.equal(one[1], found[0][1]) and one[2:6] == found[0][2:6]
        torch.testing.assert_close(one[1], everything.double().sum(0))
        assert one[2] == everything.amax()
    over, whole = found[0][3], spread(everything)
    torch.testing.assert_close(torch.tensor(over), torch.tensor((whole.count, whole.mean, whole.squares)))
    torch.testing.assert_close(
        torch.tensor(found[0][4]), torch.tensor(moments(everything, everything > -0.5)), rtol=1e-12, atol=0
    )


def test_a_batch_in_one_piece_asks_nobody():
    values = torch.tensor([1.0, 2.0])
    assert WHOLE.sum(values).tolist() == [1, 2] and WHOLE.largest(values).tolist() == [1, 2]
    assert list(WHOLE.part(3)) == [0, 1, 2]


def test_runs_of_rows_are_even_and_cover_all():
    for count in (1, 2, 3, 7):
        runs = [list(Shard(number, count).part(10)) for number in range(count)]
        assert [row for run in runs for row in run] == list(range(10))
        assert max(map(len, runs)) - min(map(len, runs)) <= 1
