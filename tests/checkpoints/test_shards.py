"""Stretches of flattened tensors as boxes, and who writes which box when several ranks hold it."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarlhf.checkpoints.shards import named_boxes, speakers, stretch_boxes, wanted_boxes
from megarlhf.config.layout import Layout
from megarlhf.models.architecture import Architecture
from megarlhf.parallel.grid import Grid
from megarlhf.weights.boxes import slices
from megarlhf.weights.local_map import hf_shapes, local_map
from tests.tiny import tiny_config

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@given(shapes, st.data())
@settings(max_examples=200, deadline=None)
def test_boxes_of_a_stretch_hold_its_elements_in_order(shape, data):
    whole = torch.arange(int(torch.tensor(shape).prod())).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    boxes = stretch_boxes(shape, start, stop)
    found = [value for box in boxes for value in whole[slices(box)].flatten().tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1


def test_every_element_is_written_once_and_read_by_all_who_hold_it():
    """Over layouts with replicas, tied embeddings and padded vocabulary, data-parallel shards cut anywhere."""
    architecture = Architecture.from_hf(tiny_config(tied=True))
    for layout, world_size in ((Layout(tp=2, pp=2), 8), (Layout(tp=4), 8), (Layout(pp=2), 6), (Layout(), 3)):
        grid = Grid(layout, world_size)
        held = [local_map(architecture, layout, at, "vocabulary") for at in grid.all_coordinates()]
        teams = grid.groups("dp_cp")
        count = {name: torch.zeros(shape) for name, shape in hf_shapes(architecture, "vocabulary").items()}
        spoken = speakers(held, teams)
        for team in teams:
            for place, rank in enumerate(sorted(team)):
                for key, tensor in held[rank].items():
                    size = int(torch.tensor(tensor.shape).prod())
                    start, stop = size * place // len(team), size * (place + 1) // len(team)
                    mine = {(name, box) for owner, name, box in spoken[rank] if owner == key}
                    for box in named_boxes(tensor, torch.ones(stop - start), start, mine):
                        count[box.name][slices(box.box)] += box.values
        assert all(bool((tensor == 1).all()) for tensor in count.values()), layout


def test_a_shard_filled_from_its_boxes_is_the_shard():
    architecture = Architecture.from_hf(tiny_config())
    values = {name: torch.randn(shape) for name, shape in hf_shapes(architecture, "vocabulary").items()}
    layout = Layout(tp=2)
    for at in Grid(layout, 2).all_coordinates():
        for tensor in local_map(architecture, layout, at, "vocabulary").values():
            local = torch.zeros(tensor.shape)
            for piece in tensor.pieces:
                local[slices(piece.target)] = values[piece.hf_name][slices(piece.source)]
            start, stop = local.numel() // 3, local.numel() * 3 // 4
            shard = torch.zeros(stop - start)
            for box in wanted_boxes(tensor, shard, start):
                box.values.copy_(values[box.name][slices(box.box)])
            assert torch.equal(shard, local.view(-1)[start:stop])
