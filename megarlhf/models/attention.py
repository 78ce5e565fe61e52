"""Self-attention on `scaled_dot_product_attention`: grouped queries, sliding windows, plain and packed rows.

Packed rows are one stream of tokens, [N, 1, ...]: `segments.PackedSegments` says where its segments begin and what they
continue. A segment attends to that and to itself; tokens after the last segment are padding, for which attention is
zero. Rotary positions come from outside, one per token, so nothing here depends on packing but the attention itself.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention as MegatronSelfAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megarlhf.models.masks import Masks
from megarlhf.models.pointwise import rotated
from megarlhf.models.segments import PackedSegments
from megarlhf.parallel.context import whole_stream
from megarlhf.parallel.logprob import soft_capped

_BLOCK_ROWS = 512
"""Queries that are scored at once where a mask is needed."""


class SelfAttention(MegatronSelfAttention):
    """megatron-core's self-attention, without what its forward pass does for inference, and with the one step that
    reads global tensor-parallel state in 0.16.1 replaced."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSegments | None = None,
        **_of_inference: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Output [S, B, H] and bias of `linear_proj`, from hidden states [S, B, H] and angles [S, 1, 1, R].

        Communicates over tp as its linears do.
        """
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        angles = rotary_pos_emb.chunk(2, -1)[0]  # the second half is the first once more
        cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        context = self.core_attention(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
        return self.linear_proj(context)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query [S, B, heads/tp, D], key and value [S, B, max(groups/tp, 1), D] from hidden states [S, B, H]."""
        assert key_value_states is None and not output_gate and split_qkv, "plain self-attention only"
        return self.split(self.linear_qkv(hidden_states)[0])

    def split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The output of `linear_qkv` [S, B, rows/tp] as query, key, value, normed where the model norms them.

        Communicates when tp exceeds the groups.

        Rows are interleaved by group: (its queries, key, value). With more tensor ranks than groups a rank holds a part
        of a group's rows, so that all are gathered and each rank takes its group, and of it its own queries.
        """
        group, groups, size = self.pg_collection.tp, self.config.num_query_groups, self.hidden_size_per_attention_head
        ranks_per_group = max(group.size() // groups, 1)
        if ranks_per_group > 1:
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=group)
            mixed = mixed.chunk(groups, dim=-1)[group.rank() // ranks_per_group]
        heads = self.config.num_attention_heads // groups
        mixed = mixed.unflatten(-1, (-1, heads + 2, size))
        query, key, value = mixed.split([heads, 1, 1], dim=3)  # not slices, whose gradients are as large as the whole
        query, key, value = query.flatten(2, 3), key.squeeze(3), value.squeeze(3)
        if ranks_per_group > 1:
            query = query.chunk(ranks_per_group, dim=2)[group.rank() % ranks_per_group]
        if self.config.qk_layernorm:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value


@dataclass(frozen=True)
class Scoring:
    """How a layer scores: which tokens a token sees, and what is done to query times key before the softmax."""

    scale: float | None = None
    """Factor of query times key; None: 1/sqrt(D)."""
    softcap: float | None = None
    """c: a score s becomes c * tanh(s / c)."""
    window: int | None = None
    """A token sees itself and the `window` - 1 tokens before it; None: all before it."""


class SDPACoreAttention(torch.nn.Module):
    """softmax of the layer's `Scoring` of q and k, times v, causal; called like megatron-core's modules."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self", "causal self-attention only"
        assert pg_collection is not None and cp_comm_type in (None, "p2p"), f"keys are gathered, not {cp_comm_type}"
        self.context = pg_collection.cp
        self.layer_number = layer_number
        self.dropout = config.attention_dropout
        self.scoring = Scoring(softmax_scale)  # the layer's own comes from layers.py

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSegments | None = None,
    ) -> Tensor:
        """Query [S, B, heads, D], key and value [S, B, groups, D] -> [S, B, heads * D]; heads and groups are a rank's.

        With `packed_seq_params`, B is 1 and S holds segments end to end. Communicates over cp: each rank has its part
        of the rows' tokens, and gathers the keys and values of all of them.
        """
        assert attention_mask is None and attention_bias is None, "the causal mask is implied"
        assert attn_mask_type in (None, AttnMaskType.causal), attn_mask_type
        if self.context.size() > 1:
            assert packed_seq_params is not None, "with cp, rows are packed"
            key, value = whole_stream(torch.cat([key, value], dim=-1), self.context).chunk(2, dim=-1)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if packed_seq_params is None:
            out = self._attend(query, key, value, Masks())
        else:
            out = self._packed(query, key, value, packed_seq_params)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packing: PackedSegments) -> Tensor:
        """query [1, heads, N/cp, D]; key and value [1, groups, N, D] -> [1, heads, N/cp, D]."""
        plan = packing.plan(key.shape[2], self.context.size(), self.context.rank())
        queries, padding = query.split(plan.query_sizes, dim=2), plan.query_sizes[-1]
        runs = zip(queries, plan.keys_of_runs(key), plan.keys_of_runs(value), strict=False)
        found = [self._attend(*run, packing.masks) for run in runs]
        if not found:
            return _Unseen.apply(query, key, value)
        return torch.cat(found + ([queries[-1] * 0.0] if padding else []), dim=2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> Tensor:
        """Query [B, heads, Q, D], key and value [B, groups, S, D], Q the last of S -> [B, heads, Q, D]."""
        if self.dropout and self.training:
            # Tensor ranks hold different heads, so they draw different masks: from the tracker, not torch's generator.
            with get_cuda_rng_tracker().fork():
                return causal_attention(query, key, value, self.scoring, self.dropout, masks)
        return causal_attention(query, key, value, self.scoring, 0.0, masks)


class _Unseen(torch.autograd.Function):
    """Zeros like the query, where a rank holds padding only: its backward pass still communicates for keys and values
    over cp, as that of ranks with tokens does."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.shapes = key.shape, value.shape
        return torch.zeros_like(query)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, ...]:
        return torch.zeros_like(slope), *(slope.new_zeros(shape) for shape in ctx.shapes)


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: Scoring = Scoring(),
    dropout: float = 0.0,
    masks: Masks | None = None,
) -> Tensor:
    """Causal attention of the last Q tokens of rows of S, or of all of them. `masks` that were needed are kept.

    query [B, heads, Q, D], key and value [B, groups, S, D] -> [B, heads, Q, D].
    """
    length, is_grouped, window = key.shape[2], query.shape[1] != key.shape[1], scoring.window
    before = length - query.shape[2]
    if before == 0 and scoring.softcap is None and (window is None or length <= window):
        return scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scoring.scale, enable_gqa=is_grouped
        )
    shape, masks = query.shape, masks or Masks()
    if is_grouped:
        # Of torch's fused kernels on a GPU, those that take a mask do not take grouped heads. So each group is a batch
        # of its own, whose keys its heads see without a copy.
        query = query.reshape(shape[0] * key.shape[1], -1, *shape[2:])
        key, value = (
            tensor.reshape(-1, 1, length, shape[3]).expand(-1, query.shape[1], -1, -1) for tensor in (key, value)
        )
    reach = length if window is None else window
    blocks, step = [], min(reach, _BLOCK_ROWS)
    for start in range(before, length, step):  # so that a mask has step * (reach + step) elements, not length^2
        first, stop = max(start - reach + 1, 0), min(start + step, length)
        mask = masks.causal(start - first, stop - start, window, query)
        part = query[:, :, start - before : stop - before], key[:, :, first:stop], value[:, :, first:stop]
        blocks.append(masked_attention(*part, mask, scoring, dropout))
    return torch.cat(blocks, dim=2).view(shape)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: Scoring, dropout: float = 0.0
) -> Tensor:
    """Attention with `mask` (0 or -inf, broadcast to [B, heads, Q, K]) added to the scores.

    query [B, heads, Q, D], key and value [B, heads, K, D] -> [B, heads, Q, D]. The mask says what is seen, the window
    of `scoring` included.
    """
    if scoring.softcap is None:
        return scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, scale=scoring.scale)
    # No fused kernel of torch caps scores; the order and the precisions are those of transformers' eager attention.
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    scores = soft_capped(query @ key.transpose(2, 3) * scale, scoring.softcap) + mask
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return torch.nn.functional.dropout(weights, dropout) @ value
