"""megarlhf: RLHF for large language models on megatron-core, with the same parallel code on CPUs and GPUs."""

__version__ = "0.1.0"
