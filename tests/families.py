"""Tiny models of every family beyond Llama, in the variants that differ: what the rooms' family tests are about."""

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
    "qwen2 tied": {"family": "qwen2", "tied": True, "num_key_value_heads": 1, "num_hidden_layers": 3},
}
FAMILIES = sorted({settings["family"] for settings in VARIANTS.values()})
