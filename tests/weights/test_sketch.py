"""Distances of weights from a few numbers: against the distances themselves."""

import pytest
import torch

from megarlhf.weights.sketch import distances, weight_sketch
from tests.tiny import write_llama


@pytest.fixture
def model(tmp_path, single_rank):
    from megarlhf.config.layout import Layout
    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.parallel.groups import build_groups
    from megarlhf.weights.load import load_weights

    folder = write_llama(tmp_path / "model")
    architecture, groups = Architecture.from_folder(folder), build_groups(Layout(), 1)
    model = build_model(architecture, groups, head="vocabulary", dtype=torch.float32, seed=None)
    load_weights(model, folder)
    return model


def test_a_sketch_tells_how_far_weights_are_apart(model, world):
    from megarlhf.weights.local_map import hf_shapes

    before = weight_sketch(model, world)
    shapes = hf_shapes(model.architecture, model.head)
    assert set(distances(before, before, shapes).values()) == {0.0}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.named_parameters().values():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    found = distances(before, weight_sketch(model, world), shapes)
    # The estimate of a mean square from 16 numbers has a relative deviation of sqrt(2 / 16).
    assert all(0.4 * 0.01 < distance < 1.9 * 0.01 for distance in found.values()), found
    assert sum(found.values()) / len(found) == pytest.approx(0.01, rel=0.15)


def test_one_changed_element_changes_its_tensor_only(model, world):
    from megarlhf.weights.local_map import hf_shapes

    before = weight_sketch(model, world)
    key, parameter = next(item for item in model.named_parameters().items() if "linear_fc2" in item[0][1])
    with torch.no_grad():
        parameter.view(-1)[7] += 0.5
    found = distances(before, weight_sketch(model, world), hf_shapes(model.architecture, model.head))
    changed = {name: distance for name, distance in found.items() if distance}
    ((name, distance),) = changed.items()
    assert "down_proj" in name and distance == pytest.approx(0.5 / parameter.numel() ** 0.5, rel=1e-4)
