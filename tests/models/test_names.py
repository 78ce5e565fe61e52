import pytest

from megarlhf.config.layout import Layout
from megarlhf.models.architecture import Architecture
from megarlhf.models.families import FAMILIES
from megarlhf.models.names import Cut, stage_weights
from tests import tiny


def table(architecture: Architecture, layout: Layout, head: str) -> list[list]:
    family = FAMILIES[architecture.family]
    return [list(stage_weights(family, architecture, layout, rank, 0, head)) for rank in range(layout.pp)]


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize(("tied", "num_labels"), [(False, 0), (True, 0), (False, 1)])
def test_stages_name_every_tensor_of_the_checkpoint_with_its_shape(pp, tied, num_labels):
    config = tiny.tiny_config(tied=tied, num_labels=num_labels)
    head = "value" if num_labels else "vocabulary"
    stages = table(Architecture.from_hf(config), Layout(pp=pp), head)
    named = [pair for stage in stages for weight in stage for pair in zip(weight.hf, weight.shapes, strict=True)]
    assert dict(named) == tiny.tiny_shapes(config)
    twice = len(named) - len(dict(named))
    assert twice == (1 if tied and pp > 1 else 0), "only a tied embedding may live on two stages"


def test_local_layer_numbers_start_at_zero_on_every_stage():
    architecture = Architecture.from_hf(tiny.tiny_config(num_hidden_layers=5))
    last = table(architecture, Layout(pp=2), "vocabulary")[1]
    assert last[0].local == "decoder.layers.0.input_layernorm.weight"
    assert last[0].hf == ("model.layers.3.input_layernorm.weight",)


def test_a_value_model_has_a_value_head_and_no_vocabulary_head():
    architecture = Architecture.from_hf(tiny.tiny_config(tied=True))
    last = table(architecture, Layout(pp=2), "value")[1]
    assert [weight.local for weight in last[-2:]] == ["decoder.final_layernorm.weight", "value_head.weight"]
    assert last[-1].hf == ("score.weight",) and last[-1].cut is Cut.WHOLE
