"""Settings of the commands that sample answers of a model folder to a file of prompts: generate, judge, revise."""

from dataclasses import dataclass

from megarlhf.config.settings import Precision


@dataclass(frozen=True)
class Answers:
    """Which prompts, how they are answered, and where. What is left of the ranks after tp * pp shares the work (dp)."""

    prompts: str = ""
    """JSONL file: `{"id": ..., "prompt": text}` or `{"id": ..., "messages": [...]}` per line; default id: the row."""
    out: str = ""
    """JSONL file to write; it appears when it is whole."""
    samples_per_prompt: int = 1
    """Samples per prompt; they share one prefill."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: int = 0
    """Sample among the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Sample among the most likely tokens that hold this much probability."""
    max_new_tokens: int = 256
    """A response is cut here."""
    min_new_tokens: int = 0
    """Stop tokens cannot be sampled before this many tokens."""
    stop_tokens: tuple[str, ...] = ()
    """Further tokens that end a response, besides the model's own end tokens."""
    seed: int = 0
    """Seed of the sampling noise: the same text in any layout and batch."""
    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    dtype: Precision = "float32"
    """Precision of weights and activations."""
    max_slots: int = 64
    """Sequences decoded at once per data-parallel rank; a finished one's slot is refilled."""
    base: str = ""
    """Where MODEL_DIR is a folder of LoRA adapters (PEFT's format): the folder of the model that they are for; empty:
    the one that its adapter_config.json names."""
    json: bool = False
    """Print the summary as one JSON object."""
