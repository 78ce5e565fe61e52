"""Tiny models of every family beyond Llama, in the variants that differ: what the rooms' family tests are about."""

VARIANTS = {
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "qwen2 tied": {"family": "qwen2", "tied": True, "num_key_value_heads": 1, "num_hidden_layers": 3},
}
FAMILIES = sorted({settings["family"] for settings in VARIANTS.values()})
