"""What one layer has that megatron-core's specs cannot say, set once after building: its own window, rope, norms."""

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from megarlhf.models.architecture import Architecture
from megarlhf.models.attention import Scoring
from megarlhf.models.moe import mark_experts
from megarlhf.models.norm import ProjectionNorm, add_post_norm
from megarlhf.models.pointwise import gated
from megarlhf.models.rope import inverse_frequencies


def finish_layer(layer: torch.nn.Module, architecture: Architecture, index: int) -> None:
    """Make a built layer the `index`-th of the model.

    megatron-core numbers layers from 1 with an offset that is right only when all stages are equal.
    """
    attention = layer.self_attention
    layer.layer_number = attention.layer_number = attention.core_attention.layer_number = index + 1
    attention.core_attention.scoring = layer_scoring(architecture, index)
    attention.register_forward_pre_hook(partial(_with_own_angles, architecture.rope_place(index)), with_kwargs=True)
    for mlp in layer.modules():
        if isinstance(mlp, MLP) and type(mlp.linear_fc1) is ColumnParallelLinear:
            mlp.forward = partial(_gated_feed_forward, mlp)
    if layer.is_moe_layer:
        layer.mlp.set_layer_number(index + 1)
        mark_experts(layer)
    if architecture.qk_norm_spans_heads:
        config, group = attention.config, attention.pg_collection.tp
        attention.q_layernorm = ProjectionNorm(config, config.num_attention_heads, group)
        attention.k_layernorm = ProjectionNorm(config, config.num_query_groups, group)
    if architecture.post_norms:
        add_post_norm(attention.linear_proj, attention.config)
        add_post_norm(layer.mlp.linear_fc2, attention.config)


def _gated_feed_forward(
    mlp: MLP, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_of_experts: Any
) -> tuple[Tensor, Tensor | None]:
    """What MLP.forward computes for a gated feed-forward without biases; hidden_states [..., H], scales [...]."""
    inner = gated(mlp.linear_fc1(hidden_states)[0], mlp.activation_func)
    if per_token_scale is not None:
        inner = (inner * per_token_scale[..., None]).to(inner.dtype)
    return mlp.linear_fc2(inner)


def layer_scoring(architecture: Architecture, index: int) -> Scoring:
    """How layer `index` scores. A rope that scales cosine and sine by f scales query times key by f^2."""
    _, factor = inverse_frequencies(architecture, architecture.ropes[architecture.rope_place(index)])
    scalar = architecture.query_scalar or architecture.head_dim
    is_plain = architecture.query_scalar is None and factor == 1.0
    scale = None if is_plain else scalar**-0.5 * factor**2
    return Scoring(scale, architecture.attention_softcap, architecture.window(index))


def _with_own_angles(place: int, _attention: torch.nn.Module, inputs: tuple, named: dict) -> tuple[tuple, dict]:
    """A call of attention with the angles of its layer's rope in place of those of all ropes."""
    return inputs, {**named, "rotary_pos_emb": named["rotary_pos_emb"][place]}
