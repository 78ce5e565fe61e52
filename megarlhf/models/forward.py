"""One forward of a model chunk over packed rows, and the heads applied to its hidden states.

The trunk ends in hidden states, [N, 1, H] or with sequence parallelism [N/tp, 1, H]; a head is applied only at the
positions that are needed, on the last stage.
"""

from typing import Protocol

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.nn.functional import embedding

from megarlhf.models.build import Model
from megarlhf.models.moe import rows_of_tokens
from megarlhf.models.segments import PackedSegments
from megarlhf.parallel.context import joined, places_here
from megarlhf.parallel.logprob import fused_logprob, soft_capped


class Packed(Protocol):
    """Rows end to end: what a forward needs of `records.PackedRows`, on the model's device (cu_seqlens on any)."""

    @property
    def input_ids(self) -> Tensor:
        """[1, N] int64."""

    @property
    def position_ids(self) -> Tensor:
        """[1, N] int64: place of a token in its row."""

    @property
    def cu_seqlens(self) -> Tensor:
        """[segments + 1] int32: where segments begin, then N."""

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest row."""


def packed_forward(
    chunk: torch.nn.Module,
    packed: Packed,
    counted_rows: int = 0,
    num_padding: int = 0,
    prefixes: tuple[tuple[int, int], ...] = (),
) -> Tensor:
    """Communicates over the chunk's tp and cp. Hidden states [N/cp, 1, H] ([N/cp/tp, 1, H] with sp) of one chunk.

    `chunk` is a GPT, or the DistributedDataParallel around one. N must be a multiple of `stream_multiple(layout)`.
    Stages after the first read what `set_input_tensor` was given. A segment is a row, unless `prefixes` has (start,
    tokens) in the stream of what it continues. Routers of experts count the tokens of the first `counted_rows` rows
    while training; these continue nothing. The last `num_padding` tokens of the stream are padding: zeros in every
    layer, so that no scale that tokens share depends on them.
    """
    starts = packed.cu_seqlens.cpu()
    # Not "thd": megatron-core would then rotate row by row. Angles are per token here (see GPT.rotary).
    read = starts[starts <= packed.input_ids.shape[1] - num_padding]
    packing = PackedSegments(
        qkv_format="sbhd",
        cu_seqlens_q=read,
        cu_seqlens_kv=read,
        max_seqlen_q=packed.max_seqlen,
        max_seqlen_kv=packed.max_seqlen,
        prefixes=prefixes,
    )
    token_rows = rows_of_tokens(starts, counted_rows).to(packed.input_ids.device) if counted_rows else None
    return chunk(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids[0],
        packed_seq_params=packing,
        token_rows=token_rows,
        num_padding=num_padding,
    )


def vocabulary_logprobs(
    model: Model, hidden: Tensor, positions: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Communicates over tp and cp. log softmax(logits / temperature) of `targets` [M] at `positions` [M], in nats.

    hidden: as `packed_forward` returns it on the last stage; positions are those of the whole stream. Returns
    (logp [M], entropy [M] or None), float32, the same on every tensor and context rank, and differentiable; padded
    vocabulary columns have probability 0.
    """
    context = model.groups.cp
    if context.size() > 1:
        mine, places = places_here(positions, _stream_tokens(model, hidden), context)
        logp, entropy = _vocabulary_logprobs(model, hidden, places, targets[mine], temperature, with_entropy)
        logp = joined(logp, mine, len(positions), context)
        return logp, None if entropy is None else joined(entropy, mine, len(positions), context)
    return _vocabulary_logprobs(model, hidden, positions, targets, temperature, with_entropy)


def _stream_tokens(model: Model, hidden: Tensor) -> int:
    """N of the whole stream."""
    return hidden.shape[0] * (model.groups.tp.size() if model.config.sequence_parallel else 1) * model.groups.cp.size()


def _vocabulary_logprobs(
    model: Model, hidden: Tensor, positions: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """At places of this rank's part of the stream."""
    group = model.groups.tp
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
        selected = _read(hidden, positions)
    else:
        selected = copy_to_tensor_model_parallel_region(_read(hidden, positions), group=group)
    return fused_logprob(
        selected,
        model.output_weight(),
        targets,
        group=group,
        vocab_size=model.architecture.vocab_size,
        temperature=temperature,
        softcap=model.architecture.logit_softcap,
        weight_gradient=model.output_weight_gradient(),
        with_entropy=with_entropy,
    )


def values(model: Model, hidden: Tensor, positions: Tensor) -> Tensor:
    """Communicates over tp with sp, and over cp. The value head at `positions` [M] of the whole stream: [M] float32, or
    [M, K] of K > 1 labels.

    hidden: as `packed_forward` returns it on the last stage of a value model. No temperature.
    """
    context = model.groups.cp
    if context.size() > 1:
        mine, places = places_here(positions, _stream_tokens(model, hidden), context)
        return joined(_values(model, hidden, places), mine, len(positions), context)
    return _values(model, hidden, positions)


def _values(model: Model, hidden: Tensor, positions: Tensor) -> Tensor:
    """At places of this rank's part of the stream."""
    if model.config.sequence_parallel:
        # Every tensor rank computes the same values, so the gradient that comes back is whole on each.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=model.groups.tp)
    return model.chunks[-1].value_head(_read(hidden, positions))


def _read(hidden: Tensor, positions: Tensor) -> Tensor:
    """[M, H] from hidden [N, 1, H]: as a table is read, since the gradient of an index that occurs several times is
    then added up in one order, by any number of threads."""
    return embedding(positions, hidden.squeeze(1))


def full_logits(model: Model, hidden: Tensor) -> Tensor:
    """Communicates over tp. All logits [N, V] of the true vocabulary: for tests and comparisons, not for training."""
    assert model.groups.cp.size() == 1, "the stream is whole"
    group = model.groups.tp
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
    local = hidden[:, 0] @ model.output_weight().T
    if model.architecture.logit_softcap is not None:
        local = soft_capped(local, model.architecture.logit_softcap)
    return gather_from_tensor_model_parallel_region(local, group=group)[:, : model.architecture.vocab_size]
