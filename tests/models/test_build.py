import pytest
import torch

from megarlhf.config.layout import Layout
from megarlhf.errors import LayoutError
from megarlhf.models.architecture import Architecture
from megarlhf.models.build import build_model
from megarlhf.models.families import FAMILIES
from megarlhf.models.names import stage_weights
from megarlhf.parallel.groups import build_groups
from tests import tiny
from tests.distributed.pool import run_on_ranks

ARCHITECTURE = Architecture.from_hf(tiny.tiny_config())


@pytest.mark.parametrize("head", ["vocabulary", "value"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_parameters_are_exactly_those_of_the_name_table(head, is_tied, alone):
    architecture = Architecture.from_hf(tiny.tiny_config(tied=is_tied))
    model = build_model(architecture, alone, head=head, dtype=torch.float32)
    table = stage_weights(FAMILIES["llama"], architecture, Layout(), 0, 0, head)
    assert {name for _, name in model.named_parameters()} == {weight.local for weight in table}


def test_the_seed_decides_the_weights(alone):
    def embedding(seed):
        return build_model(ARCHITECTURE, alone, head="vocabulary", dtype=torch.float32, seed=seed).output_weight()

    assert torch.equal(embedding(1), embedding(1))
    assert not torch.equal(embedding(1), embedding(2))
    assert embedding(1).std().item() == pytest.approx(ARCHITECTURE.initializer_range, rel=0.1)
    assert not embedding(None).any()


def build_on_rank(rank, world_size, layout, tied):
    architecture = Architecture.from_hf(tiny.tiny_config(tied=tied, num_hidden_layers=5))
    model = build_model(architecture, build_groups(layout, world_size), head="vocabulary", dtype=torch.float32)
    table = stage_weights(FAMILIES["llama"], architecture, layout, model.groups.coordinates.pp, 0, "vocabulary")
    names = {name: weight.detach().clone() for (_, name), weight in model.named_parameters().items()}
    assert set(names) == {weight.local for weight in table}
    return names, [layer.layer_number for layer in model.chunks[0].decoder.layers]


def test_uneven_stages_number_their_layers_from_the_first_and_copies_of_tied_weights_agree():
    (first, numbers), (last, more) = run_on_ranks(2, build_on_rank, Layout(pp=2), True)
    assert numbers + more == [1, 2, 3, 4, 5] and len(numbers) == 3
    assert torch.equal(first["embedding.word_embeddings.weight"], last["output_layer.weight"])


def test_data_parallel_copies_start_equal():
    (one, _), (other, _) = run_on_ranks(2, build_on_rank, Layout(), False)
    assert all(torch.equal(one[name], other[name]) for name in one)


def refuse_on_rank(rank, world_size):
    architecture = Architecture.from_hf(tiny.tiny_config(num_attention_heads=5, num_key_value_heads=5))
    try:
        build_model(architecture, build_groups(Layout(tp=2), world_size), head="value", dtype=torch.float32)
    except LayoutError as error:
        return str(error)


def test_a_layout_that_does_not_fit_is_refused_on_every_rank():
    assert all("tp 2 does not divide 5 attention heads" in answer for answer in run_on_ranks(2, refuse_on_rank))
