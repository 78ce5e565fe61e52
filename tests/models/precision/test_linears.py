"""What FP8 asks of a model's sizes, and by which names its parameters go."""

from dataclasses import replace

import pytest

from megarlhf.config.layout import Layout
from megarlhf.config.precision import FP8
from megarlhf.models.architecture import Architecture
from megarlhf.models.names import local_name
from megarlhf.models.precision.linears import Linears, te_violations, unaligned
from tests.tiny import write_llama

BLOCKWISE = Linears("te", FP8("blockwise"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Hidden 256, feed-forward 512, 4 heads of 64 in 2 groups."""
    tiny = Architecture.from_folder(write_llama(tmp_path_factory.mktemp("linears") / "llama"))
    return replace(tiny, hidden_size=256, ffn_hidden_size=512, num_heads=4, num_kv_groups=2, head_dim=64)


def test_sizes_that_kernels_take_are_not_complained_of(llama):
    assert te_violations(BLOCKWISE, llama, Layout(tp=2), "actor.train") == []
    assert unaligned(BLOCKWISE, llama, Layout(tp=2)) == []


def test_a_dimension_that_is_no_multiple_is_named_with_its_size(llama):
    odd = replace(llama, ffn_hidden_size=24 * 2)
    (line,) = te_violations(BLOCKWISE, odd, Layout(tp=2), "actor.train")
    assert line.startswith("actor.train: tp 2 leaves a rank 24 feed-forward columns")
    assert "multiple of 16" in line
    (line,) = te_violations(
        Linears("te", FP8("mxfp8")), replace(llama, ffn_hidden_size=96), Layout(tp=2), "actor.train"
    )
    assert "48 feed-forward columns" in line and "multiple of 32" in line
    assert te_violations(Linears("te"), odd, Layout(tp=2), "x") == [], "without FP8 any size will do"
    assert te_violations(Linears("emulated_fp8", FP8("blockwise")), odd, Layout(tp=2), "x") == []


def test_blocks_that_hang_over_the_edge_are_told(llama):
    assert unaligned(BLOCKWISE, llama, Layout(tp=4)) == ["64 columns of attention's output"]
    assert unaligned(Linears("te", FP8("tensorwise")), llama, Layout(tp=4)) == []


def test_layers_that_are_not_built_are_refused(llama, tmp_path):
    mixture = Architecture.from_folder(write_llama(tmp_path / "mixtral", family="mixtral"))
    (line,) = te_violations(Linears("te"), mixture, Layout(), "actor.train")
    assert "with experts are not built" in line
    (line,) = te_violations(Linears("te", FP8("delayed")), llama, Layout(pp=2), "actor.train")
    assert line.startswith("actor.train: pp 2: Transformer Engine reduces delayed scaling's magnitudes over all ranks")
    fp8 = FP8("blockwise", num_layers_at_start_in_bf16=3)
    (line,) = te_violations(Linears("te", fp8), llama, Layout(pp=2), "actor.train")
    assert "fp8.num_layers_at_start_in_bf16 is 3, and a stage has 2 layers" in line


@pytest.mark.parametrize(
    "recipe,multiple", [("blockwise", 128), ("mxfp8", 32), ("tensorwise", 16), ("delayed", 16), ("off", 1)]
)
def test_tokens_come_in_the_multiple_of_the_recipe(recipe, multiple):
    assert Linears("te", FP8(recipe)).token_multiple == multiple
    assert Linears("emulated_fp8", FP8(recipe)).token_multiple == 1


def test_a_fused_norm_goes_by_its_own_name():
    names = {
        "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.3.input_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.weight": "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.final_layernorm.weight": "decoder.final_layernorm.weight",
    }
    assert {name: local_name(name) for name in names} == names
