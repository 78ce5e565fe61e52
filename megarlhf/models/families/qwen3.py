"""Qwen3: Llama's weights, and a norm of query heads and of key heads in every layer."""

from dataclasses import replace

from megarlhf.models.families.llama import LLAMA
from megarlhf.models.names import Cut, Weight

QK_NORMS = tuple(
    Weight(
        f"decoder.layers.{{layer}}.self_attention.{letter}_layernorm.weight",
        (f"model.layers.{{layer}}.self_attn.{letter}_norm.weight",),
        Cut.WHOLE,
        (("head",),),
    )
    for letter in "qk"
)

QWEN3 = replace(LLAMA, layer=(*LLAMA.layer, *QK_NORMS))
