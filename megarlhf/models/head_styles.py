"""Where reward and value models keep their head on disk: the names that several libraries give to one linear layer.

Here it is always `score.weight` [K, H] and, where there is one, `score.bias` [K]: a row for each of K labels. What is
read under another name goes by that one, and is exported as transformers spells it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarlhf.errors import CheckpointError

WEIGHT, BIAS = "score.weight", "score.bias"
HEAD_NAMES = (WEIGHT, BIAS)
OUTPUT = "lm_head"
BESIDE_A_LANGUAGE_MODEL = ("v_head.summary", "v_head")
"""Heads that stand next to a vocabulary head, which a value model then leaves behind."""
PREFIXES = ("score", "value_head", *BESIDE_A_LANGUAGE_MODEL, "reward_head")
"""transformers' classifiers and OpenRLHF; OpenRLHF before that; TRL; TRL without its wrapper; others."""
SEQUENCE, TOKEN = "ForSequenceClassification", "ForTokenClassification"
CLASSIFIERS = (SEQUENCE, TOKEN)
"""transformers' classes, after the family's name. The first has no bias, the second has one."""
OTHER_CLASSES = ("RewardModel", "CriticModel")
"""Class names that OpenRLHF leaves in config.json."""
_OPENRLHF_PREFIX = "value_head_prefix"
POOLING_KEY, POOLING = "megarlhf_pooling", "last_token"
"""config.json's entry for where a sequence's score is read, see score_config.py."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class StoredHead:
    """The head that a folder holds."""

    prefix: str
    """Its tensors are PREFIX.weight and PREFIX.bias."""
    num_labels: int
    has_bias: bool

    @property
    def aliases(self) -> dict[str, str]:
        """The names that the head goes by here -> its names in the folder."""
        weight = {WEIGHT: f"{self.prefix}.weight"}
        return weight | {BIAS: f"{self.prefix}.bias"} if self.has_bias else weight

    @property
    def is_beside_a_language_model(self) -> bool:
        """The folder may hold a vocabulary head too."""
        return self.prefix in BESIDE_A_LANGUAGE_MODEL


def is_value_head(hf_name: str) -> bool:
    """Whether a tensor belongs to a score or value head, by the name that it goes by here."""
    return hf_name in HEAD_NAMES


def stored_head(shapes: Shapes, config: Mapping[str, Any], where: str) -> StoredHead | None:
    """The head among the tensors `shapes` of a folder with this config.json, or None for a language model.

    An lm_head with one row is a head too. Raises CheckpointError when there are several, and nothing says which counts.
    """
    named = config.get(_OPENRLHF_PREFIX)
    prefixes = dict.fromkeys([*PREFIXES, *([named] if isinstance(named, str) else [])])
    found = [prefix for prefix in prefixes if len(shapes.get(f"{prefix}.weight", ())) == 2]
    if not found and shapes.get(f"{OUTPUT}.weight", ()) == (1, config.get("hidden_size")):
        found = [OUTPUT]
    if len(found) > 1:
        names = ", ".join(f"{prefix}.weight" for prefix in found)
        raise CheckpointError(f"{where}: holds {len(found)} heads ({names}); remove all but the one that counts")
    if not found:
        return None
    (prefix,) = found
    return StoredHead(prefix, shapes[f"{prefix}.weight"][0], f"{prefix}.bias" in shapes)


def folder_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a folder of safetensors that may be a head, by their files' headers.

    Nothing for a folder without readable safetensors: whoever loads it says what is wrong.
    """
    try:
        shapes = {name: shape for file in _files(folder) for name, shape in _header(file).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {name: shape for name, shape in shapes.items() if "layers." not in name}


def _files(folder: Path) -> Iterator[Path]:
    """The files that can hold a head: all of them where there is no index, else those that hold anything but layers."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file() or (folder / "model.safetensors").is_file():
        yield folder / "model.safetensors"
        return
    where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    yield from (folder / name for name in sorted({file for tensor, file in where.items() if "layers." not in tensor}))


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by tensor name. The format: 8 bytes of length, little-endian, then JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > 2**28:
            raise ValueError(f"{file}: no safetensors header")
        entries = json.loads(stream.read(length))
    return {name: tuple(entry["shape"]) for name, entry in entries.items() if name != "__metadata__"}
