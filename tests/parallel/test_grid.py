"""The rank array: an inverse, a partition for every kind of group, and megatron-core's own enumeration."""

import pytest

from megarlhf.config.layout import Layout
from megarlhf.errors import LayoutError
from megarlhf.parallel.grid import Grid, shards

LAYOUTS = [
    (Layout(), 1),
    (Layout(tp=2), 4),
    (Layout(pp=4), 8),
    (Layout(tp=2, pp=2), 8),
    (Layout(tp=2, pp=3, cp=2), 24),
]
AXES = ["tp", "pp", "dp", "cp", "ep", "mp", "tp_cp", "dp_cp", "tp_dp_cp", "embd", "pos_embd", "expt_dp", "tp_ep_pp"]


@pytest.mark.parametrize("layout, world_size", LAYOUTS, ids=str)
def test_coordinates_and_rank_are_inverse(layout, world_size):
    grid = Grid(layout, world_size)
    assert [grid.rank(grid.coordinates(rank)) for rank in range(world_size)] == list(range(world_size))
    assert grid.all_coordinates() == [grid.coordinates(rank) for rank in range(world_size)]


@pytest.mark.parametrize("layout, world_size", LAYOUTS, ids=str)
@pytest.mark.parametrize("axis", AXES)
def test_every_rank_is_in_exactly_one_group_of_each_kind(layout, world_size, axis):
    ranks = [rank for group in Grid(layout, world_size).groups(axis) for rank in group]
    assert sorted(ranks) == list(range(world_size))


@pytest.mark.parametrize("layout, world_size", LAYOUTS, ids=str)
@pytest.mark.parametrize("axis", ["tp", "pp", "dp", "cp", "tp_cp", "dp_cp", "mp"])
def test_groups_are_those_megatron_core_would_make(layout, world_size, axis):
    from megatron.core.parallel_state import RankGenerator

    sizes = {"tp": layout.tp, "ep": 1, "dp": layout.dp(world_size), "pp": layout.pp, "cp": layout.cp}
    theirs = RankGenerator(**sizes, order="tp-cp-ep-dp-pp").get_ranks(
        "tp-pp" if axis == "mp" else axis.replace("_", "-")
    )
    assert sorted(Grid(layout, world_size).groups(axis)) == sorted(theirs)


def test_tied_embeddings_join_first_and_last_stage_and_leave_middle_stages_alone():
    assert Grid(Layout(pp=4), 4).groups("embd") == [[0, 3], [1], [2]]
    assert Grid(Layout(tp=2, pp=2), 4).groups("embd") == [[0, 2], [1, 3]]
    assert Grid(Layout(tp=2), 2).groups("embd") == [[0], [1]]


def test_a_layout_that_does_not_divide_the_world_is_refused():
    with pytest.raises(LayoutError, match="launch a multiple of 6"):
        Grid(Layout(tp=2, pp=3), 8)


def test_an_unknown_axis_and_a_rank_outside_are_refused():
    with pytest.raises(ValueError, match="no axis"):
        Grid(Layout(), 1).groups("xp")
    with pytest.raises(ValueError, match="not in a world"):
        Grid(Layout(), 1).coordinates(1)


@pytest.mark.parametrize(
    "layouts, world_size, most, expected",
    [
        ([Layout()], 4, 2, [[0, 1], [2, 3]]),
        ([Layout(tp=2)], 4, 4, [[0, 1], [2, 3]]),
        ([Layout(pp=2), Layout()], 4, 2, [[0, 2], [1, 3]]),
        ([Layout(pp=2), Layout(tp=2)], 4, 2, [[0, 1, 2, 3]]),
        ([Layout(tp=2, pp=2), Layout(tp=2), Layout(tp=4)], 8, 8, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ([Layout(tp=2, pp=2), Layout(tp=2)], 8, 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ([Layout(ep=2), Layout()], 4, 4, [[0, 1], [2, 3]]),
        ([Layout()], 6, 4, [[0, 1, 2], [3, 4, 5]]),
        ([Layout()], 4, 1, [[0, 1, 2, 3]]),
    ],
)
def test_shards_are_made_of_whole_copies_of_every_model(layouts, world_size, most, expected):
    assert shards(layouts, world_size, most) == expected


@pytest.mark.parametrize("most", [2, 8, 64])
def test_no_shard_cuts_a_group_that_works_on_the_same_rows(most):
    layouts = [Layout(tp=4, pp=2, sp=True), Layout(tp=2, cp=2), Layout(tp=8)]
    found = shards(layouts, 128, most)
    assert sorted(rank for ranks in found for rank in ranks) == list(range(128)) and most % len(found) == 0
    assert len({len(ranks) for ranks in found}) == 1
    for layout in layouts:
        for axis in ("tp", "cp", "pp", "tp_cp", "mp"):
            for group in Grid(layout, 128).groups(axis):
                assert any(set(group) <= set(ranks) for ranks in found)
