"""Tiny models of every family beyond Llama, in the variants that differ: what the rooms' family tests are about."""

import pytest

_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 20, "sliding_window": 5, "tied": True}
VARIANTS = {
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "mistral": {"family": "mistral", "sliding_window": 5},
    "mistral without window": {"family": "mistral", "sliding_window": None},
    "qwen2 in a window": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 3,
        "max_window_layers": 0,
        "num_hidden_layers": 2,
    },
    "qwen2 partly in a window": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 3,
        "max_window_layers": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "mixtral": {"family": "mixtral"},
    "qwen3_moe": {"family": "qwen3_moe"},
    "qwen3_moe with dense layers": {
        "family": "qwen3_moe",
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "tied": True,
    },
    "qwen2 tied": {"family": "qwen2", "tied": True, "num_key_value_heads": 1, "num_hidden_layers": 3},
    "olmo2": {"family": "olmo2"},
    "olmo2 tied": {"family": "olmo2", "tied": True, "num_key_value_heads": 4, "num_hidden_layers": 2},
    "phi3": {"family": "phi3"},
    "phi3 partly rotated, in a window": {
        "family": "phi3",
        "sliding_window": 5,
        "partial_rotary_factor": 0.5,
        "tied": True,
        "num_hidden_layers": 2,
    },
    "gemma2": {"family": "gemma2", "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0, **_GEMMA},
    "gemma2 untied": {
        "family": "gemma2",
        "num_hidden_layers": 2,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        **_GEMMA,
        "tied": False,
    },
    "gemma3": {
        "family": "gemma3_text",
        "num_hidden_layers": 3,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 300.0,
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
        **_GEMMA,
    },
    "gemma3 capped": {"family": "gemma3_text", "num_hidden_layers": 2, "final_logit_softcapping": 2.0, **_GEMMA},
}
FAMILIES = sorted({settings["family"] for settings in VARIANTS.values()})
ON_RANKS = ("qwen2 partly in a window", "qwen2 tied", "qwen3", "mistral", "olmo2", "phi3", "gemma2", "gemma3")
"""One a family, and tied embeddings with a single group: for tests that cost several processes."""


def require_classifier(family: str) -> None:
    """Skip a test where the installed transformers has no SequenceClassification of a family (OLMo 2 in 4.57)."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES

    if family not in NAMES:
        pytest.skip(f"this transformers has no classifier of {family}")
