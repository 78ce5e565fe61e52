"""The files around the weights of an exported folder: config.json for transformers 4 and 5, and copied companions."""

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarlhf.errors import CheckpointError
from megarlhf.models.architecture import Architecture
from megarlhf.models.head_styles import POOLING, POOLING_KEY, SEQUENCE, TOKEN
from megarlhf.models.model_types import MODEL_TYPES
from megarlhf.models.names import Head
from megarlhf.models.score_config import label_names, without_score_entries

log = logging.getLogger(__name__)

COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "spiece.model",
    "generation_config.json", "chat_template*", "additional_chat_templates", "LICENSE*", "NOTICE*",
)  # fmt: skip
"""Copied byte for byte when the source folder has them."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


def exported_config(
    source: Path, architecture: Architecture, head: Head, dtype: str, entries: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json of an export: the source's, with rope, dtype and head in both spellings that readers look for.

    `entries` are what is known about a value model's scores (`models/score_config.py`); the source's are not kept.
    transformers 4 reads `rope_theta`, `rope_scaling` and `torch_dtype`, transformers 5 `rope_parameters` and `dtype`;
    a reader that finds the other's spelling only falls back to defaults without a word.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= _rope_fields(architecture)
    config |= {"torch_dtype": dtype, "dtype": dtype, "head_dim": architecture.head_dim}
    config |= {"vocab_size": architecture.vocab_size, "num_hidden_layers": architecture.num_layers}
    if architecture.mixture is not None:
        # One name each of transformers 4 and 5 for Qwen3-MoE; Mixtral has the second.
        names = ("num_experts", "num_local_experts") if architecture.family == "qwen3_moe" else ("num_local_experts",)
        config |= dict.fromkeys(names, architecture.mixture.num_experts)
    dropped = ("num_labels", "id2label", "label2id", "quantization_config")
    config = {key: value for key, value in without_score_entries(config).items() if key not in dropped}
    model_type = MODEL_TYPES[architecture.family]
    if head == "vocabulary":
        return config | {"architectures": [f"{model_type.class_prefix}ForCausalLM"]}
    prefix = model_type.classifier_prefix or model_type.class_prefix
    kind = TOKEN if architecture.head_bias else SEQUENCE
    pad = _pad(source, config)
    if kind == SEQUENCE and pad is not None and pad in _ends(config):
        log.warning(
            "%s: pad_token_id %d ends answers too; transformers skips it, and so reads the score of an answer ending "
            "with it one token earlier than megarlhf, which reads the last token",
            *(source, pad),
        )
    classifier = {"architectures": [f"{prefix}{kind}"], "pad_token_id": pad, POOLING_KEY: POOLING}
    return config | _labels(architecture) | classifier | dict(entries)


def _labels(architecture: Architecture) -> dict[str, Any]:
    names = label_names(architecture)
    told = {"id2label": {str(place): name for place, name in enumerate(names)}, "num_labels": len(names)}
    # transformers takes one label for a regression by itself, several only when told.
    kind = {"problem_type": "regression"} if len(names) > 1 else {}
    return told | {"label2id": {name: place for place, name in enumerate(names)}} | kind


def _rope_fields(architecture: Architecture) -> dict[str, Any]:
    rope, other = architecture.rope.as_dict(), architecture.window_rope
    outside = ("rope_theta", "partial_rotary_factor")
    scaling = None if architecture.rope.kind == "default" else {k: v for k, v in rope.items() if k not in outside}
    fields = {name: rope[name] for name in outside if name in rope} | {"rope_scaling": scaling}
    if other is None:
        return fields | {"rope_parameters": rope}
    both = {"full_attention": rope, "sliding_attention": other.as_dict()}
    return fields | {"rope_local_base_freq": other.theta, "rope_parameters": both}


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds a tokenizer's vocabulary, in one of the forms that transformers reads."""
    return any((folder / name).is_file() for name in TOKENIZERS)


def require_tokenizer(folder: Path) -> None:
    """Raise CheckpointError unless the folder holds a tokenizer."""
    if not has_tokenizer(folder):
        raise CheckpointError(
            f"{folder}: has no tokenizer ({', '.join(TOKENIZERS)}), without which nobody can give the model a text; "
            "copy it there, or go on with --without-tokenizer"
        )


def copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, generation settings, chat templates and licence, byte for byte."""
    for pattern in COMPANIONS:
        for file in sorted(source.glob(pattern)):
            if file.is_dir():
                shutil.copytree(file, target / file.name, dirs_exist_ok=True)  # an earlier run may have got here
            else:
                shutil.copyfile(file, target / file.name)


def _ends(config: Mapping[str, Any]) -> list[int]:
    ends = config.get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def _pad(source: Path, config: dict[str, Any]) -> int | None:
    """By this id a reader finds a row's last token: config.json's, else generation_config's, else the end token."""
    generation = source / "generation_config.json"
    settings = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
    for found in (config.get("pad_token_id"), settings.get("pad_token_id"), config.get("eos_token_id")):
        if found is not None:
            return found[0] if isinstance(found, list) else found
    return None
