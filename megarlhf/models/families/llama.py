"""Llama: every weight of the model, by its local name and its Hugging Face names.

Shapes are words: hidden, ffn, q (heads * head_dim), kv (groups * head_dim), head, vocabulary, labels; of a mixture:
experts (their number), expert_ffn.
"""

from megarlhf.models.names import Cut, Family, Weight

_LOCAL = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."

INPUT_NORM = Weight(_LOCAL + "input_layernorm.weight", (_HF + "input_layernorm.weight",), Cut.WHOLE, (("hidden",),))
QKV = Weight(
    _LOCAL + "self_attention.linear_qkv.weight",
    tuple(_HF + f"self_attn.{letter}_proj.weight" for letter in "qkv"),
    Cut.GROUPED_QKV,
    (("q", "hidden"), ("kv", "hidden"), ("kv", "hidden")),
)
PROJECTION = Weight(
    _LOCAL + "self_attention.linear_proj.weight", (_HF + "self_attn.o_proj.weight",), Cut.COLUMNS, (("hidden", "q"),)
)
MLP_NORM = Weight(
    _LOCAL + "pre_mlp_layernorm.weight", (_HF + "post_attention_layernorm.weight",), Cut.WHOLE, (("hidden",),)
)
GATE_UP = Weight(
    _LOCAL + "mlp.linear_fc1.weight",
    (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
    Cut.GATE_UP,
    (("ffn", "hidden"), ("ffn", "hidden")),
)
DOWN = Weight(_LOCAL + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",), Cut.COLUMNS, (("hidden", "ffn"),))

LLAMA = Family(
    embedding=Weight(
        "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Cut.VOCABULARY, (("vocabulary", "hidden"),)
    ),
    layer=(INPUT_NORM, QKV, PROJECTION, MLP_NORM, GATE_UP, DOWN),
    final_norm=Weight("decoder.final_layernorm.weight", ("model.norm.weight",), Cut.WHOLE, (("hidden",),)),
    output=Weight("output_layer.weight", ("lm_head.weight",), Cut.VOCABULARY, (("vocabulary", "hidden"),)),
    value_head=Weight("value_head.weight", ("score.weight",), Cut.WHOLE, (("labels", "hidden"),)),
    ignored_suffixes=("rotary_emb.inv_freq",),
)
