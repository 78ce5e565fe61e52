"""Generation: sequences in flight over a key/value cache, with continuous batching and layout-independent noise.

This is an own generator that walks the GPT's submodules, not megatron-core's dynamic inference engine. The reason is
speed and reproducibility. For the shape of SmolLM2-135M, batch 8, 32 prompt and 64 new tokens, one thread, tokens per
second in float32 / bfloat16 were: transformers 92 / 169, megatron-core's static cache 87 / 143, its dynamic engine
74 / 112 (megatron-core 0.19.2, with CPU stand-ins for its flash-attention functions). Its forward gathers the logits of
all tensor ranks at every step, it samples from a rank's random state instead of from keys, it differs between the two
supported versions in every constructor, and in 0.19.2 it depends on a process-wide mode. How ours fares against
transformers is measured by `python -m tests.benchmarks.rollout` and told in docs/performance.md.
"""

from megarlhf.engines.generator.generator import GenerationReport, Generator
from megarlhf.engines.generator.requests import Completion, Completions, Request, Sampling

__all__ = ["Completion", "Completions", "GenerationReport", "Generator", "Request", "Sampling"]
