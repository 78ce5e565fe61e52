"""What a Hugging Face config.json says about a model, as one frozen value, or the reason why it cannot be built here.

config.json is parsed as plain JSON, so that files written by transformers 4 (`rope_theta`, `rope_scaling`) and 5
(`rope_parameters`) mean the same. The arithmetic of cutting a model over ranks (which layers a stage holds, which
layouts fit) is here too: it needs sizes only, neither torch nor weights.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megarlhf.config.layout import Layout
from megarlhf.errors import CheckpointError, LayoutError
from megarlhf.models.head_styles import (
    CLASSIFIERS,
    OTHER_CLASSES,
    POOLING,
    POOLING_KEY,
    TOKEN,
    folder_shapes,
    stored_head,
)
from megarlhf.models.mixture import (
    Mixture,
    expert_violations,
    mistyped,
    mixture_problems,
    named_alike,
    read_mixture,
)
from megarlhf.models.model_types import MODEL_TYPES, Windows
from megarlhf.models.quantisation_config import quantisation_problems
from megarlhf.models.rope_config import Rope, read_rope, read_window_rope, rope_problems

_MOST_LAYERS = 10_000
"""A slip of the pen beyond this would be worked through layer by layer."""
_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_DEFAULTS = {"hidden_act": "silu"}
_SCALARS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
"""Of the gate in a feed-forward layer, by transformers' names."""


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of one decoder-only model. `num_labels` is 0 for a language model, 1 or more for a reward or
    value model."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_groups: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    tied: bool
    rope: Rope
    num_labels: int = 0
    head_bias: bool = False
    """The score head has a bias."""
    labels: tuple[str, ...] = field(default=(), compare=False)
    """Names of the labels where config.json gives them."""
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_spans_heads: bool = False
    """The norm of query and key is over all heads together, not over each head."""
    windows: Windows = ()
    """How many tokens a token attends to, itself included, by layer; None for all before it. Empty: None everywhere."""
    window_rope: Rope | None = None
    """Rope of the layers with a window, where it is not `rope`."""
    pre_norms: bool = True
    """Attention and feed-forward take normed hidden states."""
    post_norms: bool = False
    """What attention and feed-forward give is normed before it joins the hidden states."""
    zero_centered_norms: bool = False
    """A norm multiplies by 1 + weight."""
    activation: str = "silu"
    """Of the feed-forward's gate; one of ACTIVATIONS."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the root of the hidden size (rounded to their dtype)."""
    query_scalar: float | None = None
    """Attention divides query times key by the root of this; None: of the head's dimension."""
    attention_softcap: float | None = None
    """c: attention's scores s become c * tanh(s / c)."""
    logit_softcap: float | None = None
    """c: logits z become c * tanh(z / c)."""
    mixture: Mixture | None = None
    """Experts in place of the feed-forward part of some layers."""
    initializer_range: float = field(default=0.02, compare=False)

    @property
    def num_dense_layers(self) -> int:
        """Layers with one feed-forward part."""
        return self.num_layers - (len(self.mixture.layers) if self.mixture else 0)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Architecture":
        """Read FOLDER/config.json and, from the headers of its safetensors, which head it has.

        Raises CheckpointError when config.json is missing, not JSON, or cannot be expressed.
        """
        config = read_config(folder)
        architecture = cls.from_hf(config, where=str(Path(folder) / "config.json"))
        head = stored_head(folder_shapes(Path(folder)), config, str(folder))
        if head is None:
            return architecture
        return replace(architecture, num_labels=architecture.num_labels or head.num_labels, head_bias=head.has_bias)

    @classmethod
    def from_hf(cls, config: dict[str, Any], where: str = "config.json") -> "Architecture":
        """The architecture in a parsed config.json. Raises CheckpointError naming every field that does not fit."""
        problems = _foreign(config)
        if not problems:
            kind = MODEL_TYPES[config["model_type"]]
            config = {**_DEFAULTS, **kind.defaults, **(named_alike(config) if kind.has_experts else config)}
            problems = _missing(config) + _mistyped(config) or _unsupported(config)
        if problems:
            raise CheckpointError("\n".join(f"{where}: {problem}" for problem in problems))
        num_heads, kind = config["num_attention_heads"], MODEL_TYPES[config["model_type"]]
        return cls(
            family=config["model_type"],
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            ffn_hidden_size=config["intermediate_size"],
            num_heads=num_heads,
            num_kv_groups=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            vocab_size=config["vocab_size"],
            max_positions=config.get("max_position_embeddings") or 2048,
            norm_epsilon=1e-6 if config.get("rms_norm_eps") is None else config["rms_norm_eps"],
            tied=bool(config.get("tie_word_embeddings", False)),
            rope=read_rope(config),
            num_labels=_num_labels(config),
            head_bias=_class_name(config).endswith(TOKEN),
            labels=_labels(config),
            windows=_windows(config),
            window_rope=read_window_rope(config),
            activation=config[kind.activation_field],
            query_scalar=_own(config, "query_pre_attn_scalar"),
            attention_softcap=_own(config, "attn_logit_softcapping"),
            logit_softcap=_own(config, "final_logit_softcapping"),
            mixture=read_mixture(config) if kind.has_experts else None,
            **kind.switches,
            initializer_range=config.get("initializer_range", 0.02),
        )

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different ropes of the model."""
        return (self.rope,) if self.window_rope is None else (self.rope, self.window_rope)

    def window(self, layer: int) -> int | None:
        """Tokens that a token attends to in a layer, itself included; None for itself and all before it."""
        return self.windows[layer] if self.windows else None

    def rope_place(self, layer: int) -> int:
        """Which of `ropes` a layer has."""
        return 1 if self.window_rope is not None and self.window(layer) is not None else 0


def read_config(folder: str | Path) -> dict[str, Any]:
    """FOLDER/config.json. Raises CheckpointError when it is missing or not a JSON object."""
    path, move = Path(folder) / "config.json", "give the folder of a Hugging Face model"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no config.json; {move}{_download(folder)}")
    return read_json_object(path, move)


def _download(folder: str | Path) -> str:
    """How to get a model that was named as the Hugging Face hub names it."""
    if Path(folder).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)):
        return ""
    return f". Models are not downloaded: hf download {folder} --local-dir {Path(folder).name}, and give that folder"


def read_json_object(path: Path, move: str) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError when it holds none; `move` tells what to give instead."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise CheckpointError(f"{path}: not valid JSON: {problem}") from problem
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: not a JSON object; {move}")
    return config


def label_names(architecture: Architecture) -> tuple[str, ...]:
    """The labels of a reward model in the order of its head's rows; transformers' names for those without."""
    return architecture.labels or tuple(f"LABEL_{place}" for place in range(max(1, architecture.num_labels)))


def padded_vocab(architecture: Architecture, layout: Layout) -> int:
    """Vocabulary rows over all tensor ranks: the true size rounded up to a multiple of tp."""
    return -(-architecture.vocab_size // layout.tp) * layout.tp


def stage_layers(architecture: Architecture, layout: Layout, pp_rank: int, chunk: int = 0) -> range:
    """Global layer indexes of one model chunk: chunk c of stage p is piece c * pp + p of pp * vp consecutive pieces.

    The first and the last stage have the layers that the layout gives them; the others share what is left, and where
    that is not equal the first ones take one layer more.
    """
    sizes = _piece_sizes(architecture.num_layers, layout)
    index = chunk * layout.pp + pp_rank
    start = sum(sizes[:index])
    return range(start, start + sizes[index])


def _piece_sizes(num_layers: int, layout: Layout) -> list[int]:
    first, last = layout.first_stage_layers, layout.last_stage_layers
    num_sharing = layout.pp * layout.vp - bool(first) - bool(last)
    share, left_over = divmod(num_layers - first - last, max(num_sharing, 1))
    sizes = [share + (index < left_over) for index in range(num_sharing)]
    return [first] * bool(first) + sizes + [last] * bool(last)


def kv_cache_shape(
    architecture: Architecture, layout: Layout, pp_rank: int, num_slots: int, capacity: int
) -> tuple[int, int, int, int, int, int]:
    """Keys and values of a stage's sequences in flight, [layers, 2, slots, kv_groups/tp, capacity, head_dim] on a rank.

    A tensor rank has at least one group. `capacity`: tokens of the longest sequence.
    """
    layers, groups = len(stage_layers(architecture, layout, pp_rank)), max(architecture.num_kv_groups // layout.tp, 1)
    return layers, 2, num_slots, groups, capacity, architecture.head_dim


def layout_violations(architecture: Architecture, layout: Layout, setting: str) -> list[str]:
    """Every reason why `layout` cannot hold the model, a sentence each, opening with `setting` as the user typed it."""
    tp, heads, groups, layers = layout.tp, architecture.num_heads, architecture.num_kv_groups, architecture.num_layers
    found = []
    for name, size in (("attention heads", heads), ("feed-forward columns", _cut_columns(architecture))):
        if size % tp:
            found.append(f"{setting}: tp {tp} does not divide {size} {name}; choose {_choices(architecture)}")
    if groups % tp and tp % groups:
        found.append(
            f"{setting}: tp {tp} and {groups} key/value groups: one must divide the other; "
            f"choose {_choices(architecture)}"
        )
    rows = (heads + 2 * groups) * architecture.head_dim
    if rows % tp and not found:
        found.append(
            f"{setting}: tp {tp} does not divide {rows} fused query/key/value rows; choose {_choices(architecture)}"
        )
    found += _stage_violations(layers, layout, setting)
    if layout.sp and tp == 1:
        found.append(f"{setting}: sp needs tp > 1; set sp to false or raise tp")
    return found + expert_violations(architecture.mixture, layout, setting, architecture.family)


def _stage_violations(layers: int, layout: Layout, setting: str) -> list[str]:
    """Every piece must have a layer, and all layers must be in a piece."""
    first, last = layout.first_stage_layers, layout.last_stage_layers
    num_sharing = layout.pp * layout.vp - bool(first) - bool(last)
    if not first and not last:
        if num_sharing > layers:
            return [f"{setting}: pp {layout.pp} * vp {layout.vp} stages are more than {layers} layers; lower them"]
        return []
    left = layers - first - last
    if left >= num_sharing > 0 or left == num_sharing == 0:
        return []
    return [
        f"{setting}: first_stage_layers {first} and last_stage_layers {last} leave {left} of {layers} layers for the "
        f"other {num_sharing} stages of pp {layout.pp}; each needs one or more, and none may be left over"
    ]


def require_layout(architecture: Architecture, layout: Layout, setting: str) -> None:
    """Raise LayoutError with every violation of `layout_violations`, if there is any."""
    violations = layout_violations(architecture, layout, setting)
    if violations:
        raise LayoutError(violations)


def _cut_columns(architecture: Architecture) -> int:
    """Feed-forward columns that tensor ranks cut: they cut no expert."""
    return architecture.ffn_hidden_size if architecture.num_dense_layers else 0


def _choices(architecture: Architecture) -> str:
    heads, groups, ffn = architecture.num_heads, architecture.num_kv_groups, _cut_columns(architecture)
    rows = (heads + 2 * groups) * architecture.head_dim
    even = [n for n in range(1, heads + 1) if heads % n == 0 and ffn % n == 0 and rows % n == 0]
    fits = [n for n in even if groups % n == 0 or n % groups == 0]
    return str(fits[0]) if len(fits) == 1 else ", ".join(map(str, fits[:-1])) + f" or {fits[-1]}"


def _num_labels(config: dict[str, Any]) -> int:
    if not _is_classifier(config):
        return 0
    return config.get("num_labels") or len(config.get("id2label", {"0": "", "1": ""}))


def _labels(config: dict[str, Any]) -> tuple[str, ...]:
    """Names in the order of the head's rows, of a classifier that gives its labels others than transformers' own."""
    names = config.get("id2label") or {}
    ordered = tuple(str(names.get(str(place), "")) for place in range(len(names)))
    is_default = all(name == f"LABEL_{place}" for place, name in enumerate(ordered))
    return () if is_default or len(ordered) != _num_labels(config) else ordered


def _is_classifier(config: dict[str, Any]) -> bool:
    return _class_name(config).endswith(CLASSIFIERS)


def _class_name(config: dict[str, Any]) -> str:
    return next((name for name in config.get("architectures") or () if name.endswith(CLASSIFIERS)), "")


def _windows(config: dict[str, Any]) -> Windows:
    windows = MODEL_TYPES[config["model_type"]].windows(config)
    return windows if any(windows) else ()


def _own(config: dict[str, Any], name: str) -> Any:
    """A field that only some model types have: None for the others, whatever their file holds."""
    return config.get(name) if name in MODEL_TYPES[config["model_type"]].defaults else None


def _foreign(config: dict[str, Any]) -> list[str]:
    family = config.get("model_type")
    supported = ", ".join(map(repr, MODEL_TYPES))
    return [] if family in MODEL_TYPES else [f"model_type {family!r} is not supported; supported: {supported}"]


def _missing(config: dict[str, Any]) -> list[str]:
    needed = MODEL_TYPES[config["model_type"]].needed
    missing = [name for name in _NEEDED if name not in config] + [name for name in needed if config[name] is None]
    return [f"field {name} is missing" for name in missing]


def _mistyped(config: dict[str, Any]) -> list[str]:
    """Fields whose value is of another kind than every reader of config.json expects. Null means absent, as there."""

    def found(names: tuple[str, ...], fits: Callable[[Any], bool], words: str) -> list[str]:
        given = [name for name in names if name in _NEEDED or config.get(name) is not None]
        wrong = [name for name in given if name in config and not fits(config[name])]
        return [f"field {name} is {config[name]!r}; expected {words}" for name in wrong]

    counts = (*_NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings")
    counts += tuple(name for name in ("sliding_window_pattern",) if _own(config, name) is not None)
    problems = found(counts, lambda value: type(value) is int and value > 0, "a whole number above 0")
    few = f"at most {_MOST_LAYERS}"
    problems += found(("num_hidden_layers",), lambda value: type(value) is not int or value <= _MOST_LAYERS, few)
    numbers = ("rms_norm_eps", "rope_theta", "rope_local_base_freq")
    problems += found(numbers, lambda value: type(value) in (int, float) and math.isfinite(value), "a number")
    own = tuple(name for name in _SCALARS if _own(config, name) is not None)
    problems += found(own, lambda value: type(value) in (int, float) and value > 0, "a number above 0")
    if "sliding_window" in MODEL_TYPES[config["model_type"]].defaults:
        problems += found(("sliding_window",), lambda value: type(value) is int and value > 0, "a whole number above 0")
        problems += found(("max_window_layers",), lambda value: type(value) is int, "a whole number")
        kinds = ("full_attention", "sliding_attention")
        words = f"a list of {' and '.join(kinds)}"
        problems += found(("layer_types",), lambda value: isinstance(value, list) and set(value) <= set(kinds), words)
    objects = ("rope_scaling", "rope_parameters", "quantization_config")
    problems += found(objects, lambda value: isinstance(value, dict), "an object")
    problems += mistyped(config) if MODEL_TYPES[config["model_type"]].has_experts else []
    return problems + found(("architectures",), lambda value: isinstance(value, list), "a list of names")


def _unsupported(config: dict[str, Any]) -> list[str]:
    names = config.get("architectures") or []
    problems = []
    if any(not name.endswith(("ForCausalLM", *CLASSIFIERS)) and name not in OTHER_CLASSES for name in names):
        problems.append(f"architectures {names}: expected a ...ForCausalLM, ...{CLASSIFIERS[0]} or ...{CLASSIFIERS[1]}")
    pooling = config.get(POOLING_KEY, POOLING)
    if pooling != POOLING:
        problems.append(f"{POOLING_KEY} {pooling!r} is not supported; supported: {POOLING!r}")
    kind = MODEL_TYPES[config["model_type"]]
    problems += [
        f"{name} {json.dumps(config[name])} is not supported" for name in kind.unsupported_switches if config.get(name)
    ]
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads")
    if groups and heads % groups:
        problems.append(f"num_key_value_heads {groups} does not divide num_attention_heads {heads}")
    field = kind.activation_field
    if config[field] not in ACTIVATIONS:
        problems.append(f"{field} {config[field]!r} is not supported; supported: {', '.join(map(repr, ACTIVATIONS))}")
    problems += quantisation_problems(config)
    problems += mixture_problems(config) if kind.has_experts else []
    return problems + rope_problems(config, kind.partial_rotary) + _unsupported_windows(config)


def _unsupported_windows(config: dict[str, Any]) -> list[str]:
    windows, num_layers = MODEL_TYPES[config["model_type"]].windows(config), config["num_hidden_layers"]
    if len(windows) != num_layers:
        return [f"layer_types names {len(windows)} layers, num_hidden_layers is {num_layers}"]
    return []
