"""Which Hugging Face tensors each local parameter of a pipeline stage is made of, and how tensor ranks cut them.

A family states its names once, as patterns (`families/`); `stage_weights` writes them out for one stage. Loading,
export and resharding all read this list: no torch, no files.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from megarlhf.config.layout import Layout
from megarlhf.config.lora import LoRA
from megarlhf.models.architecture import Architecture, stage_layers
from megarlhf.models.head_styles import BIAS

Head = Literal["vocabulary", "value"]

FUSED_NORMS = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)
"""(how the name of a norm's weight begins in a layer, how it begins where the norm is part of the next linear).

Transformer Engine's layers fuse them, and megatron-core's local layers store norms under the fused names too; see their
`sharded_state_dict_keys_map`.
"""


class Cut(Enum):
    """How a weight is divided over tensor ranks. Rank r of tp holds:"""

    ROWS = "rows"
    """rows [r * R/tp, (r+1) * R/tp) of one tensor."""
    COLUMNS = "columns"
    """columns [r * C/tp, (r+1) * C/tp) of one tensor."""
    VOCABULARY = "vocabulary"
    """rows of a table padded at its end to a multiple of tp; the padding belongs to no tensor."""
    GATE_UP = "gate_up"
    """[its rows of gate; its rows of up], from the tensors (gate, up)."""
    GROUPED_QKV = "grouped_qkv"
    """contiguous rows of the matrix that interleaves (q, k, v) by key/value group: [q rows of the group, k, v] each."""
    WHOLE = "whole"
    """all of one tensor, the same on every tensor rank."""


@dataclass(frozen=True)
class Weight:
    """One local parameter: its name in the chunk, the Hugging Face tensors in it, their full shapes, and the cut.

    A tensor may hold several of the parts, one below the other: it is then named for each of them (`qkv_proj`), and
    `shapes` are those of the parts.

    As a family's pattern, names hold `{layer}` and `shapes` hold words, see `families/llama.py`; `stage_weights` writes
    numbers: the local layer index in `local`, the global one in `hf`, sizes in `shapes`. `{expert}` likewise.
    """

    local: str
    hf: tuple[str, ...]
    cut: Cut
    shapes: tuple[tuple, ...]
    expert: bool = False
    """One of every expert of a mixture; whole on a tensor rank that holds the expert, whatever the cut."""

    @property
    def first_rows(self) -> tuple[int, ...]:
        """For each part the row of its tensor where it begins."""
        rows: dict[str, int] = {}
        found = []
        for name, shape in zip(self.hf, self.shapes, strict=True):
            found.append(rows.get(name, 0))
            rows[name] = found[-1] + shape[0]
        return tuple(found)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every Hugging Face tensor in it with its whole shape."""
        found: dict[str, tuple[int, ...]] = {}
        for name, first, (rows, *columns) in zip(self.hf, self.first_rows, self.shapes, strict=True):
            found[name] = (first + rows, *columns)
        return found

    @property
    def is_matrix(self) -> bool:
        """Neither a norm's weight nor a bias."""
        return len(self.shapes[0]) == 2

    @property
    def is_linear(self) -> bool:
        """A linear layer's weight, not a table's, a head's or an expert's: what LoRA and its files know of.

        transformers fuses experts in memory, where PEFT's adapters of single ones would have no place.
        """
        return self.is_matrix and not self.expert and self.cut in (Cut.ROWS, Cut.COLUMNS, Cut.GATE_UP, Cut.GROUPED_QKV)


@dataclass(frozen=True)
class Family:
    """Names of one architecture family: patterns of weights, and Hugging Face names that are no weights of ours."""

    embedding: Weight
    layer: tuple[Weight, ...]
    final_norm: Weight
    output: Weight
    value_head: Weight
    ignored_suffixes: tuple[str, ...]
    """Endings of tensor names that may be in a file and are derived, not loaded."""
    stored_names: tuple[tuple[str, str], ...] = FUSED_NORMS
    """(how a name in a layer begins, how it begins in a megatron-core checkpoint), where the two differ."""
    mixture: tuple[Weight, ...] = ()
    """In place of a layer's feed-forward weights, where the architecture has a mixture of experts."""


def stage_weights(
    family: Family, architecture: Architecture, layout: Layout, pp_rank: int, chunk: int, head: Head, ep_rank: int = -1
) -> tuple[Weight, ...]:
    """Every parameter of one model chunk, in the order embedding, layers, final norm, head.

    `ep_rank` (may be left out where layout.ep is 1) is the rank's share of the experts.

    A tied output layer appears only where the embedding does not live (last stage of several): there it is a second
    copy of the embedding's rows. A value model has a value head and no output layer.
    """
    is_first = pp_rank == 0 and chunk == 0
    is_last = pp_rank == layout.pp - 1 and chunk == layout.vp - 1
    weights = [family.embedding] if is_first else []
    found = [_written(weight, architecture, 0, 0) for weight in weights]
    for index, layer in enumerate(stage_layers(architecture, layout, pp_rank, chunk)):
        for weight in _layer(family, architecture, layer):
            experts = _experts(architecture, layout, ep_rank) if weight.expert else ((0, 0),)
            found += [_written(weight, architecture, index, layer, *expert) for expert in experts]
    if is_last:
        found += [_written(weight, architecture, 0, 0) for weight in _last(family, architecture, is_first, head)]
    return tuple(found)


def _layer(family: Family, architecture: Architecture, layer: int) -> tuple[Weight, ...]:
    mixture = architecture.mixture
    if mixture is None or layer not in mixture.layers:
        return family.layer
    return (*(weight for weight in family.layer if ".mlp." not in weight.local), *family.mixture)


def _experts(architecture: Architecture, layout: Layout, ep_rank: int) -> list[tuple[int, int]]:
    """(local index, global index) of the experts that a rank holds."""
    assert layout.ep == 1 or 0 <= ep_rank < layout.ep, f"which of the {layout.ep} shares of the experts?"
    share = architecture.mixture.num_experts // layout.ep
    return [(index, max(ep_rank, 0) * share + index) for index in range(share)]


def _last(family: Family, architecture: Architecture, is_first: bool, head: Head) -> list[Weight]:
    if head == "value":
        bias = Weight("value_head.bias", (BIAS,), Cut.WHOLE, (("labels",),))
        return [family.final_norm, family.value_head, *([bias] if architecture.head_bias else [])]
    if not architecture.tied:
        return [family.final_norm, family.output]
    copy = Weight(family.output.local, family.embedding.hf, family.output.cut, family.embedding.shapes)
    return [family.final_norm] if is_first else [family.final_norm, copy]


def _written(
    weight: Weight, architecture: Architecture, index: int, layer: int, local_expert: int = 0, expert: int = 0
) -> Weight:
    mixture = architecture.mixture
    sizes = {
        "hidden": architecture.hidden_size,
        "ffn": architecture.ffn_hidden_size,
        "q": architecture.num_heads * architecture.head_dim,
        "kv": architecture.num_kv_groups * architecture.head_dim,
        "head": architecture.head_dim,
        "vocabulary": architecture.vocab_size,
        "labels": max(1, architecture.num_labels),
        "experts": mixture.num_experts if mixture else 0,
        "expert_ffn": mixture.ffn_hidden_size if mixture else 0,
    }
    return replace(
        weight,
        local=weight.local.format(layer=index, expert=local_expert),
        hf=tuple(name.format(layer=layer, expert=expert) for name in weight.hf),
        shapes=tuple(tuple(sizes[word] for word in shape) for shape in weight.shapes),
    )


def local_name(name: str) -> str:
    """The name of a parameter of a chunk as families know it, whether its norms are fused into linears or not."""
    for local, fused in FUSED_NORMS:
        name = name.replace(f".{fused}", f".{local}")
    return name


def row_sources(weight: Weight, architecture: Architecture, tp: int, rank: int) -> list[int]:
    """For every row that tensor rank `rank` holds of a weight: the place in `weight.hf` of the tensor it comes from."""
    if weight.cut is Cut.GATE_UP:
        return [place for place, shape in enumerate(weight.shapes) for _ in range(shape[0] // tp)]
    if weight.cut is Cut.GROUPED_QKV:
        sizes = [shape[0] // architecture.num_kv_groups for shape in weight.shapes]
        group = [place for place, size in enumerate(sizes) for _ in range(size)]
        share = sum(shape[0] for shape in weight.shapes) // tp
        return (group * architecture.num_kv_groups)[rank * share : (rank + 1) * share]
    assert weight.cut in (Cut.ROWS, Cut.COLUMNS), f"{weight.local}: {weight.cut} is no linear layer's"
    return [0] * (weight.shapes[0][0] // (tp if weight.cut is Cut.ROWS else 1))


def module_of(hf_name: str) -> str:
    """Name of the module that a tensor belongs to, as PEFT's target_modules spells it: q_proj of ...q_proj.weight."""
    return hf_name.split(".")[-2]


def adapted(weight: Weight, lora: LoRA) -> tuple[str, ...]:
    """Of the tensors that a weight is made of, those that get an adapter."""
    if not weight.is_linear:
        return ()
    return tuple(name for name in dict.fromkeys(weight.hf) if module_of(name) in lora.targets)
