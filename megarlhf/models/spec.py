"""Which modules a transformer block is made of: megatron-core's local ones, with our attention and norm.

The final norm is stated too. Left to megatron-core it would be Transformer Engine's wherever that is installed.
"""

import copy
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megarlhf.models.architecture import Architecture
from megarlhf.models.attention import SDPACoreAttention, SelfAttention
from megarlhf.models.moe import Tally, expert_layer
from megarlhf.models.norm import RMSNorm
from megarlhf.parallel.groups import Groups


def layer_spec(architecture: Architecture, mlp: Any = None) -> ModuleSpec:
    """One layer: input_layernorm, self_attention (linear_qkv, linear_proj), pre_mlp_layernorm, mlp.

    Without `pre_norms` both norms do nothing and have no weights. With `qk_norm` attention has q_layernorm and
    k_layernorm too, over the dimension of a head. `mlp` stands in place of the dense feed-forward part. The rest of
    what an architecture asks for comes from layers.py.
    """
    spec = copy.deepcopy(get_gpt_layer_local_spec(normalization="RMSNorm"))
    norm = RMSNorm if architecture.pre_norms else IdentityOp
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    spec.submodules.self_attention.module = SelfAttention
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = SDPACoreAttention
    if architecture.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if mlp is not None:
        spec.submodules.mlp = mlp
    return spec


def block_spec(
    layers: range, architecture: Architecture, groups: Groups, tally: Tally | None
) -> TransformerBlockSubmodules:
    """The layers with these global indexes and a final norm (built on the last stage only).

    The list of layers is what allows uneven stages: given one layer, megatron-core divides num_layers by pp and drops
    what is left over.
    """
    mixture = architecture.mixture
    sparse = mixture.layers if mixture else ()
    mlps = [expert_layer(mixture, tally, groups) if layer in sparse else None for layer in layers]
    return TransformerBlockSubmodules(layer_specs=[layer_spec(architecture, mlp) for mlp in mlps], layer_norm=RMSNorm)
