"""What a config.json means by its `model_type`: defaults of the fields it leaves out, and switches it never states.

transformers keeps both in its configuration and model classes. A field that is null is not left out: it has no default.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

Windows = tuple[int | None, ...]
"""One entry a layer: how many tokens a token attends to, itself included; None for all before it."""


def _all_tokens(config: Mapping[str, Any]) -> Windows:
    return (None,) * config["num_hidden_layers"]


def _windows(config: Mapping[str, Any]) -> Windows:
    return (config["sliding_window"],) * config["num_hidden_layers"]


def _windows_if_used(config: Mapping[str, Any]) -> Windows:
    """`use_sliding_window` switches `sliding_window` on, for the layers that `layer_types` or `max_window_layers` say.

    `layer_types` is written by transformers 4.53 and later.
    """
    num_layers, window = config["num_hidden_layers"], config["sliding_window"]
    if not config["use_sliding_window"] or window is None:
        return (None,) * num_layers
    first = config["max_window_layers"]
    default = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    kinds = config.get("layer_types") or default
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _one_window_if_used(config: Mapping[str, Any]) -> Windows:
    """`use_sliding_window` switches `sliding_window` on in all layers."""
    return (config["sliding_window"] if config["use_sliding_window"] else None,) * config["num_hidden_layers"]


@dataclass(frozen=True)
class ModelType:
    """How one model type is to be read."""

    class_prefix: str
    """transformers' classes are PREFIXForCausalLM and PREFIXForSequenceClassification."""
    classifier_prefix: str | None = None
    """The second one's, where it is another."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields that a file may leave out, where the default is not that of every type."""
    needed: tuple[str, ...] = ()
    """Fields that must not be null, besides those of every type."""
    unsupported_switches: tuple[str, ...] = ()
    """Fields that must not be true."""
    switches: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Architecture` that are so in every model of the type."""
    activation_field: str = "hidden_act"
    partial_rotary: bool = False
    """Part of a head may be left unrotated."""
    windows: Callable[[Mapping[str, Any]], Windows] = _all_tokens
    """How far the layers of a config (with its defaults) look back."""
    has_experts: bool = False
    """Layers are mixtures of experts."""


def _windows_but(num: int, config: Mapping[str, Any]) -> Windows:
    """`layer_types` says which layers have a window; without it all but every `num`-th."""
    layers = range(config["num_hidden_layers"])
    default = ["sliding_attention" if (layer + 1) % num else "full_attention" for layer in layers]
    kinds = config.get("layer_types") or default
    return tuple(config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds)


def _windows_by_pattern(config: Mapping[str, Any]) -> Windows:
    return _windows_but(config["sliding_window_pattern"], config)


_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA_NEEDED = ("sliding_window", "query_pre_attn_scalar")
_GEMMA_SWITCHES = {"post_norms": True, "zero_centered_norms": True, "scaled_embedding": True}
_QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

MODEL_TYPES: dict[str, ModelType] = {
    "llama": ModelType("Llama", unsupported_switches=("attention_bias", "mlp_bias")),
    "qwen2": ModelType("Qwen2", defaults=_QWEN, switches={"qkv_bias": True}, windows=_windows_if_used),
    "qwen3": ModelType(
        "Qwen3",
        defaults=_QWEN | {"head_dim": 128},
        unsupported_switches=("attention_bias",),
        switches={"qk_norm": True},
        windows=_windows_if_used,
    ),
    "mistral": ModelType(
        "Mistral",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        windows=_windows,
    ),
    "olmo2": ModelType(
        "Olmo2",
        defaults={"rms_norm_eps": 1e-5},
        unsupported_switches=("attention_bias",),
        switches={"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_spans_heads": True},
    ),
    "phi3": ModelType(
        "Phi3",
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "sliding_window": None},
        partial_rotary=True,
        windows=_windows,
    ),
    "gemma2": ModelType(
        "Gemma2",
        defaults=_GEMMA
        | {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        needed=_GEMMA_NEEDED,
        unsupported_switches=("attention_bias", "use_bidirectional_attention"),
        switches=_GEMMA_SWITCHES,
        activation_field="hidden_activation",
        windows=partial(_windows_but, 2),
    ),
    "gemma3_text": ModelType(
        "Gemma3",
        classifier_prefix="Gemma3Text",
        defaults=_GEMMA
        | {"max_position_embeddings": 131072, "final_logit_softcapping": None, "sliding_window_pattern": 6}
        | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        needed=(*_GEMMA_NEEDED, "sliding_window_pattern", "rope_local_base_freq"),
        # transformers reads the cap of attention's scores and does not apply it.
        unsupported_switches=("attention_bias", "use_bidirectional_attention", "attn_logit_softcapping"),
        switches=_GEMMA_SWITCHES | {"qk_norm": True},
        activation_field="hidden_activation",
        windows=_windows_by_pattern,
    ),
    "mixtral": ModelType(
        "Mixtral",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        windows=_windows,
        has_experts=True,
    ),
    "qwen3_moe": ModelType(
        "Qwen3Moe",
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
        unsupported_switches=("attention_bias",),
        switches={"qk_norm": True},
        windows=_one_window_if_used,
        has_experts=True,
    ),
}
