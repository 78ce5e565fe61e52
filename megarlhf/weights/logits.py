"""Whether two models on disk answer alike: float32 logits (or scores) on given tokens, whichever way each is stored.

A Hugging Face folder is run by transformers, a checkpoint by megatron-core on one rank, so that a comparison across
the formats has two independent implementations. Each model is whole in memory, one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megarlhf.config.layout import Layout
from megarlhf.errors import CheckpointError
from megarlhf.models.build import Model, build_model
from megarlhf.models.forward import full_logits, packed_forward, values
from megarlhf.parallel.grid import Coordinates
from megarlhf.parallel.groups import build_groups
from megarlhf.weights.boxes import slices, whole
from megarlhf.weights.folder import SafetensorsFolder
from megarlhf.weights.local_map import local_map
from megarlhf.weights.source import Source

TOLERANCE = 1e-3
"""Largest difference that is rounding, as a part of the largest logit: float32 on another path makes about 1e-5."""


@dataclass(frozen=True)
class Answer:
    """How far two models' logits on one text are from each other."""

    num_tokens: int
    largest: float
    """Largest absolute difference."""
    scale: float
    """Largest absolute logit of the first model."""
    same_choice: float
    """Part of the positions at which both choose the same token."""

    @property
    def relative(self) -> float:
        """Largest difference, as a part of the scale."""
        return self.largest / self.scale if self.scale else self.largest


@dataclass(frozen=True)
class _Row:
    """One row as a packed stream."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int


def compare_logits(first: Source, second: Source, rows: Sequence[Sequence[int]]) -> list[Answer]:
    """One answer for each row of token ids. Joins a world of one rank; `device.prepare()` must have been called.

    Raises CheckpointError when the models have other vocabularies or heads, or a token is in neither.
    """
    sizes = [
        (source.head, source.architecture.vocab_size, source.architecture.num_labels) for source in (first, second)
    ]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"logits cannot be compared: {first.tensors.path} has a {sizes[0][0]} head for {sizes[0][1]} tokens, "
            f"{second.tensors.path} a {sizes[1][0]} head for {sizes[1][1]}; compare models of one kind"
        )
    for token in (token for row in rows for token in row):
        if not 0 <= token < sizes[0][1]:
            raise CheckpointError(f"token {token} is not in the vocabulary of {sizes[0][1]}; give others, or a --text")
    ids = [torch.tensor(row) for row in rows]
    return [_answer(one, other) for one, other in zip(_logits(first, ids), _logits(second, ids), strict=True)]


def _answer(one: torch.Tensor, other: torch.Tensor) -> Answer:
    same = float((one.argmax(-1) == other.argmax(-1)).float().mean())
    return Answer(len(one), float((one - other).abs().max()), float(one.abs().max()), same)


@torch.no_grad()
def _logits(source: Source, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """[S, V] (or [S, labels]) float32 for each row."""
    by = _by_transformers if isinstance(source.tensors, SafetensorsFolder) else _by_megatron
    return by(source, rows)


def _by_transformers(source: Source, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    import transformers

    path = str(source.tensors.path)
    config = transformers.AutoConfig.from_pretrained(str(source.config_folder), local_files_only=True)
    settings = {"config": config, "dtype": torch.float32, "local_files_only": True}
    if source.architecture.attention_softcap is not None:
        settings["attn_implementation"] = "eager"  # the default of transformers 4.57 leaves out the cap
    if source.head == "vocabulary":
        model = transformers.AutoModelForCausalLM.from_pretrained(path, **settings).eval()
        return [model(row[None]).logits[0].float() for row in rows]
    model = transformers.AutoModel.from_pretrained(path, **settings).eval()
    score = [source.tensors.read(name, whole(source.shapes[name])).float() for name in _head_names(source)]
    hidden = [model(row[None]).last_hidden_state[0] for row in rows]
    return [torch.nn.functional.linear(states, *score) for states in hidden]


def _head_names(source: Source) -> list[str]:
    """The score head's weight, and bias where it has one."""
    return [name for name in ("score.weight", "score.bias") if name in source.shapes]


def _by_megatron(source: Source, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    model = _filled(source)
    found = []
    for row in rows:
        packed = _Row(row[None], torch.arange(len(row))[None], torch.tensor([0, len(row)], dtype=torch.int32), len(row))
        hidden = packed_forward(model.chunks[0], packed)
        if source.head == "vocabulary":
            found.append(full_logits(model, hidden).float())
        else:
            found.append(values(model, hidden, torch.arange(len(row))).view(len(row), -1))
    return found


def _filled(source: Source) -> Model:
    """The model in float32, on the one rank of its world."""
    groups = build_groups(Layout(), 1)
    model = build_model(source.architecture, groups, head=source.head, dtype=torch.float32, seed=None)
    parameters = model.named_parameters()
    for key, tensor in local_map(source.architecture, Layout(), Coordinates(0, 0, 0), source.head).items():
        for piece in tensor.pieces:
            parameters[key][slices(piece.target)] = source.tensors.read(piece.hf_name, piece.source)
    model.weights_changed()
    return model
