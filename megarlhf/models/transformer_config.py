"""From our architecture and layout to megatron-core's TransformerConfig: what every run needs, stated."""

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from megarlhf.config.layout import Layout
from megarlhf.config.settings import Recompute
from megarlhf.device.labels import Timers
from megarlhf.device.megatron import fuses_weight_gradients
from megarlhf.models.architecture import Architecture
from megarlhf.models.pointwise import gelu_tanh
from megarlhf.models.precision.linears import LOCAL, Linears
from megarlhf.models.precision.te import config_fields

_RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
"""Attention itself is not worth recomputing: torch's fused kernels keep its inputs and outputs only."""


_ACTIVATIONS = {"silu": torch.nn.functional.silu, "gelu_pytorch_tanh": gelu_tanh}


def transformer_config(
    architecture: Architecture,
    layout: Layout,
    dtype: torch.dtype,
    dropout: float = 0.0,
    recompute: Recompute = "none",
    linears: Linears = LOCAL,
) -> TransformerConfig:
    """The config of a model, without dropout unless it is asked for, and with every optional fused kernel off but one:
    weight gradients are added up in the product itself where apex's kernel for it is installed.

    Micro-batches are packed and differ in length, so pipeline stages exchange shapes (`variable_seq_lengths`), and
    losses are divided by our own global counts, so megatron-core must not average (`calculate_per_token_loss`).
    """
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_kv_groups,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_epsilon,
        gated_linear_unit=True,
        activation_func=_ACTIVATIONS[architecture.activation],
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        layernorm_zero_centered_gamma=architecture.zero_centered_norms,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
        # With two stages both neighbours are one rank: messages of both directions in one call would be mixed up.
        overlap_p2p_comm=layout.vp > 1,
        batch_p2p_comm=layout.vp == 1,
        sequence_parallel=layout.sp,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        variable_seq_lengths=True,
        # Also without experts: megatron-core refuses its own default with variable lengths.
        moe_token_dispatcher_type="alltoall",
        **_experts(architecture, layout),
        calculate_per_token_loss=True,
        timers=Timers(),
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=fuses_weight_gradients(),
        **config_fields(linears),
        **_RECOMPUTE[recompute],
    )


def _experts(architecture: Architecture, layout: Layout) -> dict[str, Any]:
    """The fields about a mixture. Routing and balancing are our router's; they are stated for whoever reads them."""
    mixture = architecture.mixture
    if mixture is None:
        return {}
    is_uniform = len(mixture.layers) == architecture.num_layers
    return {
        "num_moe_experts": mixture.num_experts,
        "moe_ffn_hidden_size": mixture.ffn_hidden_size,
        "moe_layer_freq": 1 if is_uniform else [int(i in mixture.layers) for i in range(architecture.num_layers)],
        "moe_router_topk": mixture.top_k,
        # For one expert a token megatron-core has no other way; our router divides its weight by itself.
        "moe_router_pre_softmax": not mixture.normalises or mixture.top_k == 1,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": 1,
    }
