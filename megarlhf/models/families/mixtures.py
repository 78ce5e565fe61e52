"""Mixtral and Qwen3-MoE: Llama's and Qwen3's weights, and in layers with experts a router and one SwiGLU an expert."""

from dataclasses import replace

from megarlhf.models.families.llama import LLAMA
from megarlhf.models.families.qwen3 import QWEN3
from megarlhf.models.names import Cut, Weight

_LOCAL = "decoder.layers.{layer}.mlp."
_LOCAL_EXPERT = _LOCAL + "experts.local_experts.{expert}."


def _mixture(where: str, gate: str, up: str, down: str) -> tuple[Weight, ...]:
    """The weights of a layer's mixture: `where` names the module, the others the three matrices of an expert."""
    hf = f"model.layers.{{layer}}.{where}."
    expert = hf + "experts.{expert}."
    halves = (expert + f"{gate}.weight", expert + f"{up}.weight")
    ffn, hidden = "expert_ffn", "hidden"
    return (
        Weight(_LOCAL + "router.weight", (hf + "gate.weight",), Cut.WHOLE, (("experts", hidden),)),
        Weight(_LOCAL_EXPERT + "linear_fc1.weight", halves, Cut.GATE_UP, ((ffn, hidden),) * 2, expert=True),
        Weight(
            _LOCAL_EXPERT + "linear_fc2.weight",
            (expert + f"{down}.weight",),
            Cut.COLUMNS,
            ((hidden, ffn),),
            expert=True,
        ),
    )


MIXTRAL = replace(LLAMA, mixture=_mixture("block_sparse_moe", "w1", "w3", "w2"))
QWEN3_MOE = replace(QWEN3, mixture=_mixture("mlp", "gate_proj", "up_proj", "down_proj"))
