"""From a Hugging Face folder to megatron-core modules: architecture, name tables, layers, heads, one forward."""
