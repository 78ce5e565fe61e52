"""megatron-core's GPTModel of Transformer Engine's layers, configured by hand, with no help of megarlhf's builder."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megarlhf.config.layout import Layout

_GEMMA = {"gemma2", "gemma3_text"}


def config_of(given: dict, layout: Layout, **fields):
    """megatron-core's settings for a tiny model's config.json."""
    from megatron.core.transformer import TransformerConfig

    kind, num_experts = given["model_type"], given.get("num_experts", given.get("num_local_experts"))
    mixture = {
        "num_moe_experts": num_experts,
        "moe_router_topk": given.get("num_experts_per_tok"),
        "moe_ffn_hidden_size": given.get("moe_intermediate_size", given["intermediate_size"]),
        "moe_grouped_gemm": kind == "qwen3_moe",
        "moe_token_dispatcher_type": "alltoall",
        "expert_tensor_parallel_size": 1,
    }
    return TransformerConfig(
        num_layers=given["num_hidden_layers"],
        hidden_size=given["hidden_size"],
        ffn_hidden_size=given["intermediate_size"],
        num_attention_heads=given["num_attention_heads"],
        num_query_groups=given["num_key_value_heads"],
        kv_channels=given["head_dim"],
        normalization="RMSNorm",
        layernorm_epsilon=given["rms_norm_eps"],
        layernorm_zero_centered_gamma=kind in _GEMMA,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.gelu if kind in _GEMMA else torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=kind == "qwen2",
        qk_layernorm=kind in {"qwen3", "qwen3_moe", "gemma3_text"},
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        sequence_parallel=layout.sp,
        gradient_accumulation_fusion=False,
        **(mixture if num_experts else {}),
        **fields,
    )


def empty_model(given: dict, layout: Layout, **fields):
    """The GPTModel on this rank, its weights not numbers; inside `global_groups`."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    config = config_of(given, layout, **fields)
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=given["vocab_size"] + -given["vocab_size"] % layout.tp,
        max_sequence_length=128,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=given["tie_word_embeddings"],
    )
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    return model


def sharded_state(model) -> dict:
    """What megatron-core saves and loads of a rank's share."""
    from megatron.core import parallel_state

    return model.sharded_state_dict(
        metadata={"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    )


@contextmanager
def global_groups(layout: Layout) -> Iterator[None]:
    """megatron-core's own process groups; megarlhf makes none of them, but for one buffer."""
    from megatron.core import parallel_state

    parallel_state.destroy_global_memory_buffer()
    parallel_state.initialize_model_parallel(layout.tp, layout.pp, expert_tensor_parallel_size=1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
