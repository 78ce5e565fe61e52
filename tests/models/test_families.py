"""Every family beyond Llama says what transformers says, under every layout; what differs between families matters."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarlhf.config.layout import Layout
from megarlhf.errors import CheckpointError
from megarlhf.models.architecture import Architecture
from megarlhf.models.forward import full_logits, packed_forward, values
from megarlhf.models.lora import adapters, merged_parameters
from megarlhf.models.model_types import MODEL_TYPES
from tests import tiny
from tests.distributed.pool import run_on_ranks
from tests.families import FAMILIES, ON_RANKS, VARIANTS, require_classifier
from tests.models.helpers import EXACT, load, load_on_rank, random_rows, reference_logits, stream, through_stages
from tests.models.test_lora import JOINED_LINEARS, LORA, adapted_model, put
from tests.models.test_lora import logits as adapted_logits

LAYOUTS = [Layout(tp=2), Layout(pp=2), Layout(tp=4, sp=True)]
SIZES = {"hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 32, "vocab_size": 9}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    top = tmp_path_factory.mktemp("families")
    return {name: tiny.write_llama(top / name, **settings) for name, settings in VARIANTS.items()}


@pytest.fixture(scope="module")
def judges(tmp_path_factory):
    top = tmp_path_factory.mktemp("judges")
    return {family: tiny.write_llama(top / family, family=family, num_labels=1) for family in FAMILIES}


@torch.no_grad()
def logits(folder, groups, rows):
    model = load(folder, groups)
    return full_logits(model, packed_forward(model.chunks[0], stream(rows)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant, folders, alone):
    rows = random_rows()
    found = logits(folders[variant], alone, rows)
    assert torch.allclose(found, reference_logits(folders[variant], rows), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_equal_transformers(family, judges, alone):
    require_classifier(family)
    rows, model = random_rows(), load(judges[family], alone, "value")
    with torch.no_grad():
        found = values(model, packed_forward(model.chunks[0], stream(rows)), torch.arange(24))
    assert torch.allclose(found, reference_logits(judges[family], rows)[:, 0], atol=1e-4)


@torch.no_grad()
def logits_on_rank(rank, world_size, folders, rows):
    found = {}
    for name, folder in folders.items():
        for layout in LAYOUTS:
            model = load_on_rank(world_size, folder, layout)
            hidden = through_stages(model, stream(rows))
            if hidden is not None:
                found[name, layout] = full_logits(model, hidden)
    return found


def test_logits_equal_transformers_under_every_layout(folders):
    rows, some = random_rows(), {name: folders[name] for name in ON_RANKS}
    expected = {name: reference_logits(folder, rows) for name, folder in some.items()}
    ranks = run_on_ranks(4, logits_on_rank, some, rows)
    assert {key for rank in ranks for key in rank} == {(name, layout) for name in some for layout in LAYOUTS}
    for rank in ranks:
        for (name, layout), found in rank.items():
            assert torch.allclose(found, expected[name], atol=1e-4, rtol=0), (name, layout)


def changed_weights(folder, target, word, change):
    """A copy of the folder with every tensor whose name holds `word` changed."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    names = [name for name in weights if word in name]
    assert names
    save_file({**weights, **{name: change(weights[name]) for name in names}}, target / "model.safetensors")
    return target


@pytest.mark.parametrize(
    "variant, word",
    [
        ("qwen2", "q_proj.bias"),
        ("qwen2", "k_proj.bias"),
        ("qwen2", "v_proj.bias"),
        ("qwen3", "q_norm"),
        ("qwen3", "k_norm"),
        ("olmo2", "q_norm"),
        ("olmo2", "k_norm"),
        ("olmo2", "layers.1.post_attention_layernorm"),
        ("gemma2", "layers.1.post_feedforward_layernorm"),
        ("gemma2", "layers.1.pre_feedforward_layernorm"),
        ("gemma3", "layers.1.self_attn.q_norm"),
    ],
)
def test_a_wrong_small_weight_would_be_caught(variant, word, folders, alone, tmp_path):
    wrong = changed_weights(folders[variant], tmp_path / "wrong", word, lambda tensor: tensor.roll(1))
    rows = random_rows()
    assert (logits(wrong, alone, rows) - reference_logits(folders[variant], rows)).abs().max() > 1e-2


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_equal_transformers(variant, folders, alone):
    import transformers

    rows, model = random_rows(), load(folders[variant], alone)
    targets = torch.arange(sum(map(len, rows))) % tiny.VOCAB
    found = full_logits(model, packed_forward(model.chunks[0], stream(rows)))
    torch.nn.functional.cross_entropy(found, targets).backward()
    peer = transformers.AutoModelForCausalLM.from_pretrained(folders[variant], **EXACT)
    expected = torch.cat([peer(row[None]).logits[0] for row in rows])
    torch.nn.functional.cross_entropy(expected, targets).backward()
    theirs = dict(peer.named_parameters())
    for weight, parameter in table(model):
        if len(weight.hf) == 1:
            assert torch.allclose(parameter.grad, gradient(theirs, weight.hf[0]), atol=1e-5, rtol=1e-3), weight.local
        else:
            norms = [gradient(theirs, name).norm() for name in set(weight.hf)]
            assert torch.allclose(parameter.grad.norm(), torch.stack(norms).norm(), rtol=1e-4), weight.local


def gradient(theirs, name):
    """The gradient of a tensor that a file would hold under `name`; transformers 5 keeps a layer's experts in two."""
    if name in theirs:
        return theirs[name].grad
    layer, part = re.fullmatch(r"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.(.*)\.weight", name).groups()
    if part == "gate":
        return theirs[f"{layer}.mlp.gate.weight"].grad
    _, expert, matrix = part.split(".")
    if matrix in ("w2", "down_proj"):
        return theirs[f"{layer}.mlp.experts.down_proj"].grad[int(expert)]
    halves = theirs[f"{layer}.mlp.experts.gate_up_proj"].grad[int(expert)].chunk(2)
    return halves[matrix in ("w3", "up_proj")]


def table(model):
    from megarlhf.models.families import FAMILIES as TABLES
    from megarlhf.models.names import stage_weights

    parameters = model.named_parameters()
    weights = stage_weights(TABLES[model.architecture.family], model.architecture, Layout(), 0, 0, model.head)
    return [(weight, parameters[0, weight.local]) for weight in weights]


@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_adapters_are_the_same_function(variant, folders, alone):
    lora = replace(LORA, targets=JOINED_LINEARS) if VARIANTS[variant]["family"] == "phi3" else LORA
    model, other = adapted_model(folders[variant], alone, lora), load(folders[variant], alone)
    assert len(adapters(model)) == 2 * (model.architecture.num_layers + model.architecture.num_dense_layers)
    put(other, merged_parameters(model))
    assert torch.allclose(adapted_logits(model), adapted_logits(other), atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_that_transformers_saved_again_means_the_same(variant, folders, tmp_path):
    import transformers

    transformers.AutoConfig.from_pretrained(folders[variant]).save_pretrained(tmp_path)
    assert Architecture.from_folder(tmp_path) == Architecture.from_folder(folders[variant])


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_take_the_defaults_of_transformers(family):
    import transformers

    found = Architecture.from_hf({"model_type": family, **SIZES})
    peer = transformers.AutoConfig.for_model(family, pad_token_id=None, **SIZES)
    assert found.num_kv_groups == peer.num_key_value_heads and found.max_positions == peer.max_position_embeddings
    assert found.norm_epsilon == peer.rms_norm_eps and found.tied == peer.tie_word_embeddings
    rope = peer.to_dict().get("rope_parameters") or peer.to_dict()
    assert found.rope.theta == rope.get("full_attention", rope)["rope_theta"]
    fields = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
    scalars = (found.query_scalar, found.attention_softcap, found.logit_softcap)
    assert scalars == tuple(getattr(peer, field, None) for field in fields)
    model = transformers.AutoModelForCausalLM.from_config(peer)
    assert model.model.layers[0].self_attn.o_proj.in_features == found.num_heads * found.head_dim


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_is_read_where_transformers_reads_one(family):
    config = {**tiny.tiny_config(family=family), "sliding_window": 5, "use_sliding_window": False}
    assert Architecture.from_hf(config).windows == ()
    whole = {**config, "use_sliding_window": True, "max_window_layers": 0}
    assert Architecture.from_hf(whole).windows == (5, 5, 5, 5)
    assert Architecture.from_hf({**whole, "max_window_layers": 4}).windows == ()
    assert Architecture.from_hf({**whole, "max_window_layers": 3}).windows == (None, None, None, 5)
    assert Architecture.from_hf({**whole, "sliding_window": None}).windows == ()
    mixed = ["full_attention", "sliding_attention"] * 2
    assert Architecture.from_hf({**whole, "layer_types": mixed}).windows == (None, 5, None, 5)
    for fields, word in (
        ({"layer_types": mixed[:3]}, "layer_types names 3 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, "field layer_types"),
        ({"sliding_window": 0}, "field sliding_window is 0"),
    ):
        with pytest.raises(CheckpointError, match=word):
            Architecture.from_hf({**whole, **fields})


def swapped(weights, one, other):
    return {one: weights[other], other: weights[one]}


def rolled(weights, name, rows):
    """Heads in another order, in the first `rows` of a projection."""
    return {name: torch.cat([weights[name][:rows].roll(tiny.HEAD_DIM, 0), weights[name][rows:]])}


MIX_UPS = {
    "gate and up": ("gemma2", lambda w: swapped(w, "mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "joined gate and up": (
        "phi3",
        lambda w: {"mlp.gate_up_proj.weight": w["mlp.gate_up_proj.weight"].roll(tiny.FFN, 0)},
    ),
    "heads": ("olmo2", lambda w: rolled(w, "self_attn.q_proj.weight", tiny.HEADS * tiny.HEAD_DIM)),
    "joined heads": ("phi3", lambda w: rolled(w, "self_attn.qkv_proj.weight", tiny.HEADS * tiny.HEAD_DIM)),
    "norms": ("gemma3", lambda w: swapped(w, "post_attention_layernorm.weight", "pre_feedforward_layernorm.weight")),
}


@pytest.mark.parametrize("mix_up", MIX_UPS)
def test_a_mix_up_in_one_layer_would_be_caught(mix_up, folders, alone, tmp_path):
    (variant, change), at = MIX_UPS[mix_up], "model.layers.1."
    wrong = shutil.copytree(folders[variant], tmp_path / "wrong")
    weights = load_file(wrong / "model.safetensors")
    changed = change({name.removeprefix(at): weight for name, weight in weights.items()})
    weights |= {at + name: weight.contiguous() for name, weight in changed.items()}
    save_file({name: weight.clone() for name, weight in weights.items()}, wrong / "model.safetensors")
    rows = random_rows()
    assert (logits(wrong, alone, rows) - reference_logits(folders[variant], rows)).abs().max() > 1e-2


@pytest.mark.parametrize(
    "variant, field, value",
    [
        ("olmo2", "rms_norm_eps", 1e-3),
        ("phi3 partly rotated, in a window", "partial_rotary_factor", 1.0),
        ("phi3 partly rotated, in a window", "sliding_window", 6),
        ("gemma2", "attn_logit_softcapping", 3.3),
        ("gemma2", "final_logit_softcapping", 2.2),
        ("gemma2", "query_pre_attn_scalar", 22),
        ("gemma2", "hidden_activation", "silu"),
        ("gemma2", "layer_types", ["full_attention", "sliding_attention"] * 2),
        ("gemma3", "rope_local_base_freq", 350.0),
        ("gemma3", "rope_theta", 4000.0),
        ("gemma3", "rms_norm_eps", 1e-3),
    ],
)
def test_a_wrong_constant_would_be_caught(variant, field, value, folders, alone, tmp_path):
    wrong = shutil.copytree(folders[variant], tmp_path / "wrong")
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({**config, field: value}))
    rows = random_rows()
    assert (logits(wrong, alone, rows) - reference_logits(folders[variant], rows)).abs().max() > 1e-3


@pytest.mark.parametrize(
    "family, fields, words",
    [
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention true is not supported"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "field sliding_window_pattern is 0"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        ("gemma2", {"query_pre_attn_scalar": None}, "field query_pre_attn_scalar is missing"),
        ("gemma2", {"sliding_window": None}, "field sliding_window is missing"),
        ("gemma2", {"final_logit_softcapping": -1}, "field final_logit_softcapping is -1; expected a number above 0"),
        ("gemma2", {"attention_bias": True}, "attention_bias true"),
        ("olmo2", {"attention_bias": True}, "attention_bias true"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "'longrope'"),
        ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_what_a_family_cannot_have_is_refused_by_name(family, fields, words):
    with pytest.raises(CheckpointError, match=words):
        Architecture.from_hf(tiny.tiny_config(family=family, **fields))


@pytest.mark.parametrize("window", [4, 6, None])
def test_a_wrong_window_would_be_caught(window, folders, alone, tmp_path):
    wrong = shutil.copytree(folders["mistral"], tmp_path / "wrong")
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({**config, "sliding_window": window}))
    rows = random_rows()
    assert (logits(wrong, alone, rows) - reference_logits(folders["mistral"], rows)).abs().max() > 1e-2


def test_mistral_looks_back_4096_tokens_unless_its_config_says_otherwise():
    config = tiny.tiny_config(family="mistral")
    assert Architecture.from_hf(config).windows == (4096,) * 4
    assert Architecture.from_hf({**config, "sliding_window": None}).windows == ()


def test_the_refusal_of_an_unknown_family_names_the_known_ones():
    with pytest.raises(CheckpointError) as caught:
        Architecture.from_hf(json.loads('{"model_type": "gpt2"}'))
    assert all(repr(name) in str(caught.value) for name in MODEL_TYPES)
