"""Which modules a transformer block is made of: megatron-core's local ones or Transformer Engine's, with our attention
and, where a norm is no part of a linear, our norm.

The final norm is stated too. Left to megatron-core it would be Transformer Engine's wherever that is installed.
"""

import copy
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megarlhf.models.architecture import Architecture
from megarlhf.models.attention import SDPACoreAttention, SelfAttention
from megarlhf.models.moe import Tally, expert_layer
from megarlhf.models.norm import RMSNorm
from megarlhf.models.precision.linears import LOCAL, Linears
from megarlhf.parallel.groups import Groups


def layer_spec(architecture: Architecture, mlp: Any = None, linears: Linears = LOCAL) -> ModuleSpec:
    """One layer: input_layernorm, self_attention (linear_qkv, linear_proj), pre_mlp_layernorm, mlp.

    Without `pre_norms` both norms do nothing and have no weights, nor where the linears after them have them: those of
    Transformer Engine, unless adapters are to stand beside them. With `qk_norm` attention has q_layernorm and
    k_layernorm too, over the dimension of a head. `mlp` stands in place of the dense feed-forward part. The rest of
    what an architecture asks for comes from layers.py.
    """
    is_te = linears.layers == "te"
    fuses_norms = is_te and architecture.pre_norms and not linears.takes_adapters
    if is_te:
        spec = _te_layer(fuses_norms)
    else:
        spec = copy.deepcopy(get_gpt_layer_local_spec(normalization="RMSNorm"))
    norm = RMSNorm if architecture.pre_norms and not fuses_norms else IdentityOp
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    spec.submodules.self_attention.module = SelfAttention
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = SDPACoreAttention
    if architecture.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if mlp is not None:
        spec.submodules.mlp = mlp
    return spec


def _te_layer(fuses_norms: bool) -> ModuleSpec:
    """megatron-core's layer of Transformer Engine's modules; its attention's are replaced by the caller."""
    spec = copy.deepcopy(get_gpt_layer_with_transformer_engine_spec())
    if not fuses_norms:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear  # imports Transformer Engine

        mlp = spec.submodules.mlp
        submodules = mlp.submodules if isinstance(mlp, ModuleSpec) else mlp.keywords["submodules"]  # 0.16.1, 0.19.2
        spec.submodules.self_attention.submodules.linear_qkv = submodules.linear_fc1 = TEColumnParallelLinear
    return spec


def block_spec(
    layers: range, architecture: Architecture, groups: Groups, tally: Tally | None, linears: Linears
) -> TransformerBlockSubmodules:
    """The layers with these global indexes and a final norm (built on the last stage only).

    The list of layers is what allows uneven stages: given one layer, megatron-core divides num_layers by pp and drops
    what is left over.
    """
    mixture = architecture.mixture
    sparse = mixture.layers if mixture else ()
    mlps = [expert_layer(mixture, tally, groups) if layer in sparse else None for layer in layers]
    return TransformerBlockSubmodules(
        layer_specs=[layer_spec(architecture, mlp, linears) for mlp in mlps], layer_norm=RMSNorm
    )
