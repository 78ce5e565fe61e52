"""A model of Transformer Engine's layers and megarlhf read each other's checkpoints, whatever the family and layout.

The model is megatron-core's own, of its own spec for Transformer Engine, cut over four ranks: two tensor ranks with
sequence parallelism, two stages.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarlhf.config.layout import Layout
from megarlhf.weights.convert import write_hugging_face, write_megatron
from megarlhf.weights.torch_dist import TorchDistFolder
from tests import tiny
from tests.distributed.pool import run_on_ranks
from tests.families import VARIANTS

LAYOUT = Layout(tp=2, pp=2, sp=True)
KINDS = {
    "llama": {},
    "llama tied": {"tied": True},
    "mistral": VARIANTS["mistral"],
    "qwen2": VARIANTS["qwen2"],
    "qwen3": VARIANTS["qwen3"],
    "phi3": VARIANTS["phi3"],
    "mixtral": VARIANTS["mixtral"],
    "qwen3_moe": VARIANTS["qwen3_moe"],
    "gemma2": VARIANTS["gemma2"],
    "gemma3": VARIANTS["gemma3"] | {"num_hidden_layers": 4},
}
SANDWICHED = {"gemma2", "gemma3"}
"""Families with norms after attention and feed-forward, for which megatron-core's spec has no modules."""


def read(rank: int, world_size: int, folder: str, checkpoint: str) -> tuple[dict, dict, list[str]]:
    """After megatron-core's own loader, as strict as it is by default: weights by the name that they have in the whole
    model; for each (tensor_model_parallel, partition_dim, sequence_parallel); and the modules' types."""
    from megatron.core import dist_checkpointing

    from tests.transformer_engine_cpu.theirs import empty_model, global_groups, sharded_state

    given = json.loads(Path(folder, "config.json").read_text())
    with global_groups(LAYOUT):
        model = empty_model(given, LAYOUT)
        model.load_state_dict(dist_checkpointing.load(sharded_state(model), checkpoint))
    first = rank // LAYOUT.tp * given["num_hidden_layers"] // LAYOUT.pp
    named = {in_whole_model(name, first): parameter for name, parameter in model.named_parameters()}
    marks = {name: marks_of(parameter) for name, parameter in named.items()}
    weights = {name: parameter.detach().clone() for name, parameter in named.items()}
    return weights, marks, sorted({type(module).__name__ for module in model.modules()})


def in_whole_model(name: str, first: int) -> str:
    """`name` with the number of its layer in the model, on a stage whose layers begin with number `first`."""
    if not name.startswith("decoder.layers."):
        return name
    number, _, rest = name.removeprefix("decoder.layers.").partition(".")
    return f"decoder.layers.{int(number) + first}.{rest}"


def marks_of(parameter) -> tuple[bool, int | None, bool]:
    """What megatron-core and Transformer Engine note on parameters, absent meaning no."""
    is_cut = getattr(parameter, "tensor_model_parallel", False)
    return is_cut, parameter.partition_dim if is_cut else None, bool(getattr(parameter, "sequence_parallel", False))


def interleaved(weights: dict, layer: str, suffix: str) -> torch.Tensor:
    """linear_qkv: for each key/value group its query heads, its key, its value."""
    if f"{layer}self_attn.qkv_proj.{suffix}" in weights:
        rows = [count * tiny.HEAD_DIM for count in (tiny.HEADS, tiny.GROUPS, tiny.GROUPS)]
        parts = weights[f"{layer}self_attn.qkv_proj.{suffix}"].split(rows)
    else:
        parts = [weights[f"{layer}self_attn.{which}_proj.{suffix}"] for which in "qkv"]
    groups = [part.view(tiny.GROUPS, -1, *part.shape[1:]) for part in parts]
    return torch.cat(groups, dim=1).flatten(0, 1)


def experts(weights: dict, layer: str) -> dict[str, torch.Tensor]:
    """The feed-forward part by megatron-core's local names, dense or a mixture."""
    if f"{layer}mlp.gate_up_proj.weight" in weights:
        first = weights[f"{layer}mlp.gate_up_proj.weight"]
        return {"linear_fc1.weight": first, "linear_fc2.weight": weights[f"{layer}mlp.down_proj.weight"]}
    if f"{layer}mlp.gate_proj.weight" in weights:
        first = [weights[f"{layer}mlp.{which}_proj.weight"] for which in ("gate", "up")]
        return {"linear_fc1.weight": torch.cat(first), "linear_fc2.weight": weights[f"{layer}mlp.down_proj.weight"]}
    is_qwen = f"{layer}mlp.gate.weight" in weights
    part, names = (
        ("mlp", ("gate_proj", "up_proj", "down_proj")) if is_qwen else ("block_sparse_moe", ("w1", "w3", "w2"))
    )
    router, found = weights[f"{layer}{part}.gate.weight"], {}
    for expert in range(len(router)):
        gate, up, down = (weights[f"{layer}{part}.experts.{expert}.{name}.weight"] for name in names)
        one, two = ("linear_fc1.weight", "linear_fc2.weight")
        if is_qwen:  # grouped: an expert's number ends the name
            one, two = f"experts.{one}{expert}", f"experts.{two}{expert}"
        else:
            one, two = f"experts.local_experts.{expert}.{one}", f"experts.local_experts.{expert}.{two}"
        found |= {one: torch.cat([gate, up]), two: down}
    return found | {"router.weight": router}


def expected_of(weights: dict) -> dict[str, torch.Tensor]:
    """What a GPTModel of Transformer Engine's layers holds, from the Hugging Face tensors, written out by hand."""
    embedding = padded(weights["model.embed_tokens.weight"])
    found = {
        "embedding.word_embeddings.weight": embedding,
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
        # A tied head is a second copy on the last stage.
        "output_layer.weight": padded(weights["lm_head.weight"]) if "lm_head.weight" in weights else embedding,
    }
    for number in range(tiny.LAYERS):
        theirs, ours = f"model.layers.{number}.", f"decoder.layers.{number}."
        feed_forward = experts(weights, theirs)
        norm = "pre_mlp_layernorm.weight" if "router.weight" in feed_forward else "mlp.linear_fc1.layer_norm_weight"
        before = "pre_feedforward" if f"{theirs}pre_feedforward_layernorm.weight" in weights else "post_attention"
        found[f"{ours}{norm}"] = weights[f"{theirs}{before}_layernorm.weight"]
        found |= {f"{ours}mlp.{name}": tensor for name, tensor in feed_forward.items()}
        attention = f"{ours}self_attention."
        found[f"{attention}linear_qkv.layer_norm_weight"] = weights[f"{theirs}input_layernorm.weight"]
        found[f"{attention}linear_qkv.weight"] = interleaved(weights, theirs, "weight")
        found[f"{attention}linear_proj.weight"] = weights[f"{theirs}self_attn.o_proj.weight"]
        if f"{theirs}self_attn.q_proj.bias" in weights:
            found[f"{attention}linear_qkv.bias"] = interleaved(weights, theirs, "bias")
        for which in "qk":
            if f"{theirs}self_attn.{which}_norm.weight" in weights:
                found[f"{attention}{which}_layernorm.weight"] = weights[f"{theirs}self_attn.{which}_norm.weight"]
    return found


def padded(table: torch.Tensor) -> torch.Tensor:
    """With rows of zeros up to a multiple of the tensor ranks."""
    return torch.nn.functional.pad(table, (0, 0, 0, -len(table) % LAYOUT.tp))


def cut(name: str, tensor: torch.Tensor, tp_rank: int) -> torch.Tensor:
    """What a tensor rank holds: rows of the tables, of gate and of up, and of query, key and value; columns of what
    comes after; all of norms, routers and experts."""
    if "layer_norm" in name or "layernorm" in name or "router" in name or ".experts." in name:
        return tensor
    if "linear_fc1" in name:
        return torch.cat([half.chunk(LAYOUT.tp)[tp_rank] for half in tensor.chunk(2)])
    return tensor.chunk(LAYOUT.tp, dim=axis_of(name))[tp_rank]


def axis_of(name: str) -> int:
    return 1 if "linear_proj" in name or "linear_fc2" in name else 0


@pytest.fixture(scope="module")
def read_back(tmp_path_factory):
    """For a kind (folder of the original, what the four ranks of a model read of its checkpoint), made once."""
    top, found = tmp_path_factory.mktemp("te"), {}

    def of(kind: str):
        if kind not in found:
            folder = tiny.write_llama(top / kind, **KINDS[kind])
            write_megatron(folder, top / f"{kind}_megatron", Layout(tp=1, pp=4))
            found[kind] = folder, run_on_ranks(4, read, str(folder), str(top / f"{kind}_megatron"))
        return found[kind]

    return of


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_of_transformer_engines_layers_is_in_our_checkpoint(read_back, kind):
    """Each rank has its own part, and together they have every weight."""
    folder, ranks = read_back(kind)
    expected, seen = expected_of(load_file(folder / "model.safetensors")), set()
    for rank, (weights, _, _) in enumerate(ranks):
        assert weights
        for name, tensor in weights.items():
            assert torch.equal(tensor, cut(name, expected[name], rank % LAYOUT.tp)), name
        seen |= set(weights)
    assert seen == set(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_marks_say_how_weights_are_cut(read_back, kind):
    for _, marks, _ in read_back(kind)[1]:
        for name, (is_cut, axis, is_of_sequence) in marks.items():
            if ".experts." in name:
                continue  # whole on a rank; megatron-core's two versions mark them differently
            is_whole = "norm" in name or "router" in name
            assert (is_cut, axis) == ((False, None) if is_whole else (True, axis_of(name))), name
            assert is_of_sequence == is_whole, name


@pytest.mark.parametrize(
    ("kind", "modules"),
    [
        ("llama", {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention", "RMSNorm"}),
        ("mixtral", {"SequentialMLP", "TEColumnParallelLinear", "TERowParallelLinear"}),
        ("qwen3_moe", {"TEGroupedMLP", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"}),
    ],
)
def test_they_were_transformer_engines_layers(read_back, kind, modules):
    assert modules <= {module for _, _, modules in read_back(kind)[1] for module in modules}


def save(folder: Path, checkpoint: Path, target: Path, **fields) -> None:
    """Read megarlhf's checkpoint of a model, save it with megatron-core again."""
    from megatron.core import dist_checkpointing

    from tests.transformer_engine_cpu.theirs import empty_model, global_groups, sharded_state

    with global_groups(Layout()):
        model = empty_model(json.loads((folder / "config.json").read_text()), Layout(), **fields)
        model.load_state_dict(dist_checkpointing.load(sharded_state(model), str(checkpoint)))
        target.mkdir()
        dist_checkpointing.save(sharded_state(model), str(target))


@pytest.mark.parametrize("kind", ["qwen2", "mixtral", "qwen3_moe", "llama with states"])
def test_what_a_model_of_transformer_engines_layers_saved_is_read(tmp_path, single_rank, kind):
    """Its extra states, pickles under delayed scaling, are not looked at, and are not in what is written."""
    kind, _, is_delayed = kind.partition(" with ")
    source = tiny.write_llama(tmp_path / "hf", **KINDS[kind])
    write_megatron(source, tmp_path / "megatron", Layout(tp=2))
    fields = {"fp8": "hybrid", "fp8_recipe": "delayed"} if is_delayed else {}
    save(source, tmp_path / "megatron", tmp_path / "saved", **fields)
    assert any(name.partition("/")[0].endswith("_extra_state") for name in TorchDistFolder(tmp_path / "saved").objects)
    write_hugging_face(tmp_path / "saved", tmp_path / "back", config=source)
    original, back = (load_file(tmp_path / where / "model.safetensors") for where in ("hf", "back"))
    assert original.keys() == back.keys()
    assert all(torch.equal(tensor, back[name]) for name, tensor in original.items())


@pytest.mark.parametrize("kind", sorted(SANDWICHED))
def test_only_norms_after_attention_and_feed_forward_have_no_module_there(read_back, kind):
    from megarlhf.models.architecture import Architecture
    from megarlhf.weights.megatron_keys import key_shapes

    folder, ranks = read_back(kind)
    ours = set(key_shapes(Architecture.from_folder(folder), LAYOUT, "vocabulary"))
    parts = (name.split(".") for weights, _, _ in ranks for name in weights)
    theirs = {".".join(part for part in name if not part.isdigit()) for name in parts}
    assert ours - theirs == {
        "decoder.layers.self_attention.linear_proj.post_layernorm.weight",
        "decoder.layers.mlp.linear_fc2.post_layernorm.weight",
    }


def refusal(rank: int, world_size: int, folder: str, checkpoint: str) -> str:
    try:
        read(rank, world_size, folder, checkpoint)
    except BaseException as error:  # torch's CheckpointException is no Exception
        return str(error)
    return ""


def test_a_model_without_norms_before_is_refused_by_a_spec_that_has_them(tmp_path):
    """OLMo 2: megatron-core names the weights that the checkpoint does not have."""
    folder = tiny.write_llama(tmp_path / "olmo2", family="olmo2")
    write_megatron(folder, tmp_path / "megatron", Layout())
    for words in run_on_ranks(4, refusal, str(folder), str(tmp_path / "megatron")):
        assert "linear_qkv.layer_norm_weight" in words
