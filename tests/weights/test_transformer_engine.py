"""A model of Transformer Engine's layers reads the checkpoints written here, though megarlhf's own has none of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarlhf.config.layout import Layout
from megarlhf.weights.convert import write_megatron
from tests import tiny

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
KINDS = {
    "llama": {},
    "qwen2": {"family": "qwen2", "tied": True},
    "qwen3": {"family": "qwen3"},
    "mixtral": {"family": "mixtral"},
    "qwen3_moe": {"family": "qwen3_moe"},
}


@pytest.fixture(scope="module")
def read_back(tmp_path_factory):
    """(folder of the originals, what a process of megatron-core with Transformer Engine read of each kind)."""
    if not (ROOT / ".te/transformer_engine").is_dir():
        pytest.skip("no unpacked transformer-engine wheel in .te; `make te-reference` fetches it")
    top = tmp_path_factory.mktemp("te")
    for kind, settings in KINDS.items():
        write_megatron(tiny.write_llama(top / kind, **settings), top / f"{kind}_megatron", Layout(tp=2, pp=2))
    words = [sys.executable, "-m", "tests.weights.transformer_engine_reads", str(top), *KINDS]
    done = subprocess.run(words, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return top, {kind: torch.load(top / f"{kind}.pt", weights_only=True) for kind in KINDS}


def interleaved(weights: dict, layer: str, suffix: str) -> torch.Tensor:
    """linear_qkv: for each key/value group its query heads, its key, its value."""
    parts = [weights[f"{layer}self_attn.{which}_proj.{suffix}"] for which in "qkv"]
    groups = [part.view(tiny.GROUPS, -1, *part.shape[1:]) for part in parts]
    return torch.cat(groups, dim=1).flatten(0, 1)


def experts(weights: dict, layer: str) -> dict[str, torch.Tensor]:
    """The feed-forward part by megatron-core's local names, dense or a mixture."""
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
    found = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    if "lm_head.weight" in weights:
        found["output_layer.weight"] = weights["lm_head.weight"]
    for number in range(tiny.LAYERS):
        theirs, ours = f"model.layers.{number}.", f"decoder.layers.{number}."
        feed_forward = experts(weights, theirs)
        norm = "pre_mlp_layernorm.weight" if "router.weight" in feed_forward else "mlp.linear_fc1.layer_norm_weight"
        found[f"{ours}{norm}"] = weights[f"{theirs}post_attention_layernorm.weight"]
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


@pytest.mark.parametrize("kind", KINDS)
def test_transformer_engines_layers_hold_every_weight(read_back, kind):
    top, found = read_back
    expected = expected_of(load_file(top / kind / "model.safetensors"))
    assert found[kind]["weights"].keys() == expected.keys()
    for name, tensor in found[kind]["weights"].items():
        assert torch.equal(tensor[: len(expected[name])], expected[name]), name


@pytest.mark.parametrize(
    ("kind", "modules"),
    [
        ("llama", {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention", "RMSNorm"}),
        ("mixtral", {"SequentialMLP", "TEColumnParallelLinear", "TERowParallelLinear"}),
        ("qwen3_moe", {"TEGroupedMLP", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"}),
    ],
)
def test_they_were_transformer_engines_layers(read_back, kind, modules):
    assert modules <= set(read_back[1][kind]["modules"])
