"""Phi-3 and Phi-4: Llama's weights, where one tensor holds query, key and value, and one gate and up."""

from dataclasses import replace

from megarlhf.models.families.llama import DOWN, GATE_UP, INPUT_NORM, LLAMA, MLP_NORM, PROJECTION, QKV

_QKV = replace(QKV, hf=("model.layers.{layer}.self_attn.qkv_proj.weight",) * 3)
_GATE_UP = replace(GATE_UP, hf=("model.layers.{layer}.mlp.gate_up_proj.weight",) * 2)

PHI3 = replace(LLAMA, layer=(INPUT_NORM, _QKV, PROJECTION, MLP_NORM, _GATE_UP, DOWN))
