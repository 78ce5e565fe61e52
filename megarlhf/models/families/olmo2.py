"""OLMo 2: Llama's linears; norms after attention and feed-forward, and of whole query and key projections.

The norms after are stored by the names that Megatron-Bridge gives them; megatron-core has no such module.
"""

from dataclasses import replace

from megarlhf.models.families.llama import DOWN, GATE_UP, LLAMA, PROJECTION, QKV
from megarlhf.models.names import Cut, Weight

_LOCAL = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."

POST_ATTENTION_NORM = Weight(
    _LOCAL + "self_attention.linear_proj.post_layernorm.weight",
    (_HF + "post_attention_layernorm.weight",),
    Cut.WHOLE,
    (("hidden",),),
)
POST_MLP_NORM = Weight(
    _LOCAL + "mlp.linear_fc2.post_layernorm.weight",
    (_HF + "post_feedforward_layernorm.weight",),
    Cut.WHOLE,
    (("hidden",),),
)
_QK_NORMS = tuple(
    Weight(
        _LOCAL + f"self_attention.{letter}_layernorm.weight",
        (_HF + f"self_attn.{letter}_norm.weight",),
        Cut.WHOLE,
        ((size,),),
    )
    for letter, size in (("q", "q"), ("k", "kv"))
)

OLMO2 = replace(LLAMA, layer=(QKV, *_QK_NORMS, PROJECTION, POST_ATTENTION_NORM, GATE_UP, DOWN, POST_MLP_NORM))
