"""Gemma 2 and 3: Llama's linears; norms before and after attention and feed-forward, in Gemma 3 of heads too."""

from dataclasses import replace

from megarlhf.models.families.llama import DOWN, GATE_UP, INPUT_NORM, LLAMA, MLP_NORM, PROJECTION, QKV
from megarlhf.models.families.olmo2 import POST_ATTENTION_NORM, POST_MLP_NORM
from megarlhf.models.families.qwen3 import QK_NORMS

_PRE_MLP_NORM = replace(MLP_NORM, hf=("model.layers.{layer}.pre_feedforward_layernorm.weight",))
_LAYER = (INPUT_NORM, QKV, PROJECTION, POST_ATTENTION_NORM, _PRE_MLP_NORM, GATE_UP, DOWN, POST_MLP_NORM)

GEMMA2 = replace(LLAMA, layer=_LAYER)
GEMMA3 = replace(LLAMA, layer=(*_LAYER, *QK_NORMS))
