"""Tiny random models and a tiny tokenizer, written as Hugging Face folders for every room's tests.

The sizes are chosen so that a mix-up shows: no two dimensions are equal, head_dim is not hidden / heads, there are
fewer key/value groups than heads, and the vocabulary is prime.
"""

import json
from pathlib import Path

import torch

HIDDEN, FFN, LAYERS, HEADS, GROUPS, HEAD_DIM, VOCAB = 32, 56, 4, 4, 2, 12, 101
NORM_EPSILON = 1e-5
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 16,
}
MIXTURES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
EOS = "<|end|>"
PAD = "<|pad|>"
UNKNOWN = "<|unk|>"


def tiny_config(
    *, family: str = "llama", tied: bool = False, llama3: bool = False, num_labels: int = 0, **fields
) -> dict:
    """config.json of a tiny model in the spelling of transformers 4 (both versions read it). `fields` override."""
    prefix = "".join(part.capitalize() for part in family.split("_"))
    prefix = {"gemma3_text": "Gemma3Text" if num_labels else "Gemma3"}.get(family, prefix)
    kind = prefix + ("ForSequenceClassification" if num_labels else "ForCausalLM")
    config = {
        "architectures": [kind],
        "model_type": family,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": 5000.0,
        "rope_scaling": dict(LLAMA3_ROPE) if llama3 else None,  # a copy: transformers writes into it
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "torch_dtype": "float32",
    }
    if num_labels:
        config["num_labels"] = num_labels
        config["id2label"] = {str(label): f"LABEL_{label}" for label in range(num_labels)}
        config["label2id"] = {f"LABEL_{label}": label for label in range(num_labels)}
    if family in MIXTURES:
        config |= MIXTURES[family]
    return {**config, **fields}


def tiny_experts(config: dict, layer: int) -> dict[str, tuple[int, ...]]:
    """Router and experts of one layer, whatever the config calls them; nothing where the layer has none."""
    hidden, number = config["hidden_size"], config.get("num_experts", config.get("num_local_experts", 0))
    is_dense = layer in config.get("mlp_only_layers", []) or (layer + 1) % config.get("decoder_sparse_step", 1)
    if not number or is_dense:
        return {}
    is_mixtral = config["model_type"] == "mixtral"
    ffn = config["intermediate_size"] if is_mixtral else config["moe_intermediate_size"]
    at = f"model.layers.{layer}." + ("block_sparse_moe." if is_mixtral else "mlp.")
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    shapes = {at + "gate.weight": (number, hidden)}
    for expert in range(number):
        shapes |= {f"{at}experts.{expert}.{name}.weight": (ffn, hidden) for name in (gate, up)}
        shapes |= {f"{at}experts.{expert}.{down}.weight": (hidden, ffn)}
    return shapes


def tiny_weights(config: dict, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Random weights under their Hugging Face names, large enough that attention and norms matter."""
    generator = torch.Generator().manual_seed(seed)
    weights, centre = {}, 0 if config["model_type"].startswith("gemma") else 1
    for name, shape in tiny_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = (centre + 0.3 * noise if "norm" in name else noise * 1.5 / shape[-1] ** 0.5).to(dtype)
    return weights


def tiny_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint with this config.json, and its shape."""
    hidden, kind = config["hidden_size"], config["model_type"]
    query, key = (config[f"num_{which}_heads"] * config["head_dim"] for which in ("attention", "key_value"))
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}{name}_layernorm.weight": (hidden,) for name in _NORMS.get(kind, ("input", "post_attention"))}
        experts = tiny_experts(config, layer)
        linears = {at + name: shape for name, shape in _linears(config, query, key).items()}
        shapes |= {name: shape for name, shape in linears.items() if not (experts and ".mlp." in name)} | experts
        if kind == "qwen2":
            shapes |= {at + "self_attn.q_proj.bias": (query,)}
            shapes |= {at + f"self_attn.{letter}_proj.bias": (key,) for letter in "kv"}
        if kind in ("qwen3", "gemma3_text", "qwen3_moe"):
            shapes |= {at + f"self_attn.{letter}_norm.weight": (config["head_dim"],) for letter in "qk"}
        if kind == "olmo2":
            shapes |= {at + "self_attn.q_norm.weight": (query,), at + "self_attn.k_norm.weight": (key,)}
    if config.get("num_labels"):
        shapes["score.weight"] = (config["num_labels"], hidden)
    elif not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


_SANDWICH = ("input", "post_attention", "pre_feedforward", "post_feedforward")
_NORMS = {"olmo2": ("post_attention", "post_feedforward"), "gemma2": _SANDWICH, "gemma3_text": _SANDWICH}


def _linears(config: dict, query: int, key: int) -> dict[str, tuple[int, ...]]:
    """The order counts: it is the order in which random weights are drawn, and learning tests know theirs."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    out, down = {"self_attn.o_proj.weight": (hidden, query)}, {"mlp.down_proj.weight": (hidden, ffn)}
    if config["model_type"] == "phi3":
        joined = {"self_attn.qkv_proj.weight": (query + 2 * key, hidden), "mlp.gate_up_proj.weight": (2 * ffn, hidden)}
        return out | joined | down
    first = {"self_attn.q_proj.weight": (query, hidden)} | out
    key_value = {f"self_attn.{letter}_proj.weight": (key, hidden) for letter in "kv"}
    return first | key_value | {f"mlp.{which}_proj.weight": (ffn, hidden) for which in ("gate", "up")} | down


def write_llama(
    folder: str | Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, num_shards: int = 1, **settings
) -> Path:
    """Write a tiny random model to `folder` (config.json, safetensors, tokenizer); returns it.

    `settings` are those of `tiny_config`: family, tied, llama3, num_labels and any field of config.json. With several
    shards there is an index file, as for large models.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(**settings)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write_safetensors(folder, tiny_weights(config, seed, dtype), num_shards)
    write_tokenizer(folder, config["vocab_size"])
    return folder


def _write_safetensors(folder: Path, weights: dict[str, torch.Tensor], num_shards: int) -> None:
    from safetensors.torch import save_file

    if num_shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, where = sorted(weights), {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::num_shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(folder: str | Path, vocab_size: int = VOCAB) -> Path:
    """Write a byte-for-byte tokenizer to `folder`: printable ASCII and a few more; <|end|> is 0, <|pad|> is 1."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    characters = ["\n"] + [chr(code) for code in range(32, 127)]
    tokens = [EOS, PAD, UNKNOWN] + characters
    tokens += [f"<|extra{index}|>" for index in range(vocab_size - len(tokens))]
    specials = [token for token in tokens if token.startswith("<|")]
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer_json(tokens, specials), ensure_ascii=True))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": PAD, "unk_token": UNKNOWN}
    settings |= {"clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE, "model_max_length": 128}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return folder


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + '>' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a>' }}{% endif %}"
)


def _tokenizer_json(tokens: list[str], specials: list[str]) -> dict:
    added = [
        {"id": tokens.index(token), "content": token, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for token in specials
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "unk_token": UNKNOWN,
        },
    }
