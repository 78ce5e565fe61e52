"""Which rows and columns a rank holds, against answers written out by hand and against a slow assembly of tensors."""

import pytest
import torch

from megarlhf.config.layout import Layout
from megarlhf.models.architecture import Architecture
from megarlhf.parallel.grid import Coordinates
from megarlhf.weights.boxes import num_elements, slices
from megarlhf.weights.local_map import hf_shapes, local_map
from tests.tiny import tiny_config, tiny_shapes

QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


def architecture_of(**fields) -> Architecture:
    return Architecture.from_hf(tiny_config(**fields))


def rows(architecture: Architecture, layout: Layout, tp_rank: int, name: str) -> list[str]:
    """Short names of a local tensor's rows, such as q0; padding is a dot."""
    tensor = local_map(architecture, layout, Coordinates(tp=tp_rank, pp=0, dp=0), "vocabulary")[0, name]
    found = ["."] * tensor.shape[0]
    for piece in tensor.pieces:
        word = piece.hf_name.split(".")[-2].removesuffix("_proj").removesuffix("_tokens")
        for source, target in zip(range(*piece.source[0]), range(*piece.target[0]), strict=True):
            assert found[target] == "."
            found[target] = f"{word}{source}"
    return found


def test_gate_and_up_lie_one_below_the_other_on_every_tensor_rank():
    architecture = architecture_of(intermediate_size=4)
    cut = [rows(architecture, Layout(tp=2), rank, "decoder.layers.0.mlp.linear_fc1.weight") for rank in (0, 1)]
    assert cut == [["gate0", "gate1", "up0", "up1"], ["gate2", "gate3", "up2", "up3"]]


def test_query_key_value_rows_are_interleaved_by_group():
    architecture = architecture_of(num_attention_heads=4, num_key_value_heads=2, head_dim=1)
    assert rows(architecture, Layout(), 0, QKV) == ["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"]
    assert rows(architecture, Layout(tp=2), 1, QKV) == ["q2", "q3", "k1", "v1"]


def test_more_tensor_ranks_than_groups_cut_the_interleaved_rows_where_they_fall():
    architecture = architecture_of(num_attention_heads=4, num_key_value_heads=2, head_dim=1)
    cut = [rows(architecture, Layout(tp=4), rank, QKV) for rank in range(4)]
    assert cut == [["q0", "q1"], ["k0", "v0"], ["q2", "q3"], ["k1", "v1"]]


def test_vocabulary_rows_are_padded_to_a_multiple_of_tp_and_the_padding_is_nobodys():
    architecture = architecture_of(vocab_size=11)
    cut = [rows(architecture, Layout(tp=4), rank, "embedding.word_embeddings.weight") for rank in range(4)]
    assert [len(part) for part in cut] == [3, 3, 3, 3]
    assert sum(cut, []) == [f"embed{row}" for row in range(11)] + ["."]


def test_a_rank_may_hold_padding_only():
    architecture = architecture_of(vocab_size=9)
    assert rows(architecture, Layout(tp=4), 3, "embedding.word_embeddings.weight") == [".", ".", "."]


@pytest.mark.parametrize("layers, expected", [(4, [[0, 1], [2], [3]]), (5, [[0, 1], [2, 3], [4]])])
def test_uneven_stages_hold_every_layer_once_under_its_global_number(layers, expected):
    architecture = architecture_of(num_hidden_layers=layers)
    held = []
    for stage in range(3):
        found = local_map(architecture, Layout(pp=3), Coordinates(tp=0, pp=stage, dp=0), "vocabulary")
        norms = [tensor for (_, name), tensor in found.items() if name.endswith("input_layernorm.weight")]
        held.append([int(tensor.pieces[0].hf_name.split(".")[2]) for tensor in norms])
    assert held == expected


def test_virtual_chunks_interleave_over_stages():
    found = local_map(architecture_of(), Layout(pp=2, vp=2), Coordinates(tp=0, pp=1, dp=0), "vocabulary")
    norms = {
        key: tensor.pieces[0].hf_name for key, tensor in found.items() if key[1].endswith("input_layernorm.weight")
    }
    assert norms == {
        (0, "decoder.layers.0.input_layernorm.weight"): "model.layers.1.input_layernorm.weight",
        (1, "decoder.layers.0.input_layernorm.weight"): "model.layers.3.input_layernorm.weight",
    }


def test_tied_embeddings_live_on_the_first_and_the_last_stage():
    stages = [
        local_map(architecture_of(tied=True), Layout(pp=3), Coordinates(tp=0, pp=stage, dp=0), "vocabulary")
        for stage in range(3)
    ]
    where = [
        [name for (_, name), tensor in stage.items() if "embed_tokens" in tensor.pieces[0].hf_name] for stage in stages
    ]
    assert where == [["embedding.word_embeddings.weight"], [], ["output_layer.weight"]]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["vocabulary", "value"])
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=2), Layout(tp=4), Layout(tp=2, pp=3), Layout(pp=2, vp=2)], ids=str
)
def test_all_ranks_together_hold_every_element_and_nothing_else(layout, head, tied):
    config = tiny_config(tied=tied, num_labels=int(head == "value"))
    architecture = Architecture.from_hf(config)
    assert hf_shapes(architecture, head) == tiny_shapes(config)
    missing = {name: torch.ones(shape, dtype=torch.bool) for name, shape in tiny_shapes(config).items()}
    for stage in range(layout.pp):
        for rank in range(layout.tp):
            for tensor in local_map(architecture, layout, Coordinates(tp=rank, pp=stage, dp=0), head).values():
                filled = torch.zeros(tensor.shape, dtype=torch.int64)
                for piece in tensor.pieces:
                    missing[piece.hf_name][slices(piece.source)] = False
                    filled[slices(piece.target)] += 1
                    assert (
                        num_elements(piece.source) == num_elements(piece.target) == filled[slices(piece.target)].sum()
                    )
                assert filled.max() <= 1
    assert not any(mask.any() for mask in missing.values())
