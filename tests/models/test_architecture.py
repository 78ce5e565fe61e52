import json

import pytest

from megarlhf.config.layout import Layout
from megarlhf.errors import CheckpointError, LayoutError
from megarlhf.models.architecture import Architecture, layout_violations, padded_vocab, require_layout, stage_layers
from tests import tiny

LAYOUTS = [(5, 1), (5, 2), (30, 4), (30, 7), (4, 4), (32, 3)]


def test_config_json_gives_every_size():
    found = Architecture.from_hf(tiny.tiny_config(tied=True))
    assert (found.num_layers, found.hidden_size, found.ffn_hidden_size) == (tiny.LAYERS, tiny.HIDDEN, tiny.FFN)
    assert (found.num_heads, found.num_kv_groups, found.head_dim) == (tiny.HEADS, tiny.GROUPS, tiny.HEAD_DIM)
    assert (found.vocab_size, found.norm_epsilon, found.tied, found.num_labels) == (tiny.VOCAB, 1e-5, True, 0)


def test_both_spellings_of_rope_mean_the_same():
    old = tiny.tiny_config(llama3=True)
    new = {name: value for name, value in old.items() if name not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**tiny.LLAMA3_ROPE, "rope_theta": old["rope_theta"]}
    assert Architecture.from_hf(old) == Architecture.from_hf(new)
    assert Architecture.from_hf(old).rope.theta == 5000.0


def test_the_old_key_for_the_kind_of_rope_is_read():
    config = tiny.tiny_config(rope_scaling={"type": "linear", "factor": 2.0})
    assert Architecture.from_hf(config).rope.kind == "linear"


@pytest.mark.parametrize("version", ["4", "5"])
def test_absent_fields_take_the_defaults_of_transformers(version):
    config = tiny.tiny_config()
    for name in ("head_dim", "num_key_value_heads", "rope_theta", "rms_norm_eps", "tie_word_embeddings"):
        del config[name]
    if version == "5":
        config["rope_parameters"] = {"rope_type": "default"}
    found = Architecture.from_hf(config)
    assert (found.head_dim, found.num_kv_groups) == (tiny.HIDDEN // tiny.HEADS, tiny.HEADS)
    assert (found.rope.theta, found.norm_epsilon, found.tied) == (10000.0, 1e-6, False)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "needs low_freq_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"architectures": ["LlamaForQuestionAnswering"]}, "architectures"),
        ({"num_labels": 1, "megarlhf_pooling": "mean"}, "megarlhf_pooling 'mean'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(fields, word):
    labels = {"num_labels": fields["num_labels"]} if "num_labels" in fields else {}
    rest = {name: value for name, value in fields.items() if name not in labels}
    with pytest.raises(CheckpointError, match=word):
        Architecture.from_hf(tiny.tiny_config(**labels, **rest))


def test_all_problems_are_listed_at_once():
    with pytest.raises(CheckpointError) as caught:
        Architecture.from_hf(tiny.tiny_config(attention_bias=True, mlp_bias=True, hidden_act="relu"))
    assert len(str(caught.value).splitlines()) == 3


def test_a_folder_without_a_readable_config_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        Architecture.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        Architecture.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny.tiny_config(num_labels=1)))
    assert Architecture.from_folder(tmp_path).num_labels == 1


@pytest.mark.parametrize(("num_layers", "pp"), LAYOUTS)
def test_stages_hold_every_layer_once_in_order_and_differ_by_at_most_one(num_layers, pp):
    architecture = Architecture.from_hf(tiny.tiny_config(num_hidden_layers=num_layers))
    stages = [stage_layers(architecture, Layout(pp=pp), rank) for rank in range(pp)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_virtual_stages_interleave():
    architecture = Architecture.from_hf(tiny.tiny_config(num_hidden_layers=8))
    layout = Layout(pp=2, vp=2)
    assert [list(stage_layers(architecture, layout, rank, 1)) for rank in range(2)] == [[4, 5], [6, 7]]


@pytest.mark.parametrize(
    "pp,first,last,sizes",
    [(4, 1, 0, [1, 3, 2, 2]), (4, 0, 1, [3, 2, 2, 1]), (4, 1, 2, [1, 3, 2, 2]), (2, 3, 5, [3, 5])],
)
def test_first_and_last_stages_have_the_layers_they_are_given(pp, first, last, sizes):
    architecture = Architecture.from_hf(tiny.tiny_config(num_hidden_layers=8))
    layout = Layout(pp=pp, first_stage_layers=first, last_stage_layers=last)
    assert layout_violations(architecture, layout, "actor.train") == []
    stages = [stage_layers(architecture, layout, rank) for rank in range(pp)]
    assert [len(stage) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage] == list(range(8))


@pytest.mark.parametrize("pp,first,last", [(2, 8, 0), (4, 7, 0), (2, 3, 4), (3, 4, 4), (2, 9, 0)])
def test_stages_without_layers_and_layers_without_a_stage_are_refused(pp, first, last):
    architecture = Architecture.from_hf(tiny.tiny_config(num_hidden_layers=8))
    layout = Layout(pp=pp, first_stage_layers=first, last_stage_layers=last)
    (violation,) = layout_violations(architecture, layout, "actor.train")
    assert f"first_stage_layers {first} and last_stage_layers {last} leave {8 - first - last} of 8" in violation


def test_the_vocabulary_is_padded_to_a_multiple_of_tp():
    architecture = Architecture.from_hf(tiny.tiny_config())
    assert [padded_vocab(architecture, Layout(tp=tp)) for tp in (1, 2, 4)] == [101, 102, 104]


def test_a_layout_that_does_not_fit_names_numbers_and_choices():
    architecture = Architecture.from_hf(tiny.tiny_config())
    (first, *_) = layout_violations(architecture, Layout(tp=3), "actor.train")
    assert first == "actor.train: tp 3 does not divide 4 attention heads; choose 1, 2 or 4"
    assert layout_violations(architecture, Layout(tp=4, sp=True), "actor.train") == []
    assert "5" in layout_violations(architecture, Layout(pp=5), "actor.train")[0]
    assert "sp needs tp" in layout_violations(architecture, Layout(sp=True), "actor.train")[0]
    with pytest.raises(LayoutError, match="tp 3"):
        require_layout(architecture, Layout(tp=3), "actor.train")


def test_kv_groups_and_tp_must_divide_one_another():
    architecture = Architecture.from_hf(tiny.tiny_config(num_attention_heads=12, num_key_value_heads=4, head_dim=8))
    found = layout_violations(architecture, Layout(tp=6), "critic.train")
    assert any("4 key/value groups" in sentence for sentence in found)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": "2"}, "field num_hidden_layers is '2'; expected a whole number above 0"),
        ({"vocab_size": None}, "field vocab_size is None; expected a whole number above 0"),
        ({"num_attention_heads": 0}, "field num_attention_heads is 0; expected a whole number above 0"),
        ({"hidden_size": True}, "field hidden_size is True; expected a whole number above 0"),
        ({"max_position_embeddings": 2.5}, "field max_position_embeddings is 2.5; expected a whole number above 0"),
        ({"rms_norm_eps": "1e-5"}, "field rms_norm_eps is '1e-5'; expected a number"),
        ({"rope_scaling": "linear"}, "field rope_scaling is 'linear'; expected an object"),
        ({"architectures": "LlamaForCausalLM"}, "field architectures is 'LlamaForCausalLM'; expected a list of names"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 4"),
    ],
)
def test_a_field_of_another_kind_is_refused_by_name(fields, words):
    with pytest.raises(CheckpointError) as caught:
        Architecture.from_hf({**tiny.tiny_config(), **fields})
    assert words in str(caught.value)


def test_null_means_absent_as_in_transformers():
    fields = {"max_position_embeddings": None, "rms_norm_eps": None, "num_key_value_heads": None, "head_dim": None}
    found = Architecture.from_hf({**tiny.tiny_config(), **fields})
    assert (found.max_positions, found.norm_epsilon, found.num_kv_groups, found.head_dim) == (2048, 1e-6, 4, 8)


def test_a_config_that_is_no_object_says_so(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        Architecture.from_folder(tmp_path)


def test_a_number_of_layers_that_cannot_be_meant_is_refused_at_once():
    with pytest.raises(CheckpointError, match="num_hidden_layers is 1000000000; expected at most 10000"):
        Architecture.from_hf(tiny.tiny_config(num_hidden_layers=10**9))
