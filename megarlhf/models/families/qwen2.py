"""Qwen2 and Qwen2.5: Llama's weights, and biases of query, key and value."""

from dataclasses import replace

from megarlhf.models.families.llama import LLAMA
from megarlhf.models.names import Cut, Weight

_QKV_BIAS = Weight(
    "decoder.layers.{layer}.self_attention.linear_qkv.bias",
    tuple(f"model.layers.{{layer}}.self_attn.{letter}_proj.bias" for letter in "qkv"),
    Cut.GROUPED_QKV,
    (("q",), ("kv",), ("kv",)),
)

QWEN2 = replace(LLAMA, layer=(*LLAMA.layer, _QKV_BIAS))
