"""GPT: megatron-core's GPTModel for one pipeline stage, ending in hidden states; heads are applied in forward.py."""

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megarlhf import device
from megarlhf.models.architecture import Architecture, padded_vocab, stage_layers
from megarlhf.models.heads import ValueHead
from megarlhf.models.layers import finish_layer
from megarlhf.models.moe import Tally
from megarlhf.models.names import Head
from megarlhf.models.precision.linears import LOCAL, Linears
from megarlhf.models.products import use_host_products
from megarlhf.models.rope import inverse_frequencies, rotary_angles
from megarlhf.models.spec import block_spec
from megarlhf.parallel.context import held_tokens
from megarlhf.parallel.groups import Groups


class GPT(GPTModel):
    """The layers of one chunk; the embedding in the first chunk; final norm and a head's weights in the last.

    `head` "vocabulary" keeps `output_layer` (its weight is absent when tied on a single stage); "value" has
    `value_head` in its place.
    """

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Architecture,
        groups: Groups,
        head: Head,
        index: int,
        tally: Tally | None,
        linears: Linears = LOCAL,
    ):
        """`index`: number of the chunk among those of its rank. `tally` is shared by the routers of a model with
        experts."""
        layers = stage_layers(architecture, groups.layout, groups.coordinates.pp, index)
        is_last = groups.is_last_stage and index == groups.layout.vp - 1
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(layers, architecture, groups, tally, linears),
            vocab_size=padded_vocab(architecture, groups.layout),
            max_sequence_length=architecture.max_positions,
            pre_process=groups.is_first_stage and index == 0,
            post_process=is_last,
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied and head == "vocabulary",
            position_embedding_type="rope",
            pg_collection=groups.collection,
            vp_stage=index if groups.layout.vp > 1 else None,
        )
        ropes = [inverse_frequencies(architecture, rope)[0] for rope in architecture.ropes]
        self.inverse_frequencies = torch.stack(ropes).to(device.current())
        self.embedding_factor = architecture.hidden_size**0.5 if architecture.scaled_embedding else None
        for layer, index in zip(self.decoder.layers, layers, strict=True):
            finish_layer(layer, architecture, index)
        if head == "value" and is_last:
            del self.output_layer
            self.value_head = ValueHead(
                architecture.hidden_size, max(1, architecture.num_labels), has_bias=architecture.head_bias
            )
        if device.is_host():
            use_host_products(self)

    def rotary(self, position_ids: Tensor) -> Tensor:
        """Angles [K, N, 1, 1, R] for positions [N], in float32, for each of the architecture's ropes."""
        return rotary_angles(self.inverse_frequencies, position_ids)

    def embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Communicates over tp. First hidden states [S, B, H] ([S/tp, B, H] with sp), on the first stage."""
        embedded = self.embedding(input_ids=input_ids, position_ids=position_ids)
        if self.embedding_factor is None:
            return embedded
        return embedded * torch.tensor(self.embedding_factor, dtype=embedded.dtype)

    def _without_padding(self, embedded: Tensor, is_padding: Tensor) -> Tensor:
        """`embedded` with zeros for padding; `is_padding` [S] of the tokens of all tensor ranks."""
        if self.config.sequence_parallel:
            is_padding = is_padding.chunk(self.pg_collection.tp.size())[self.pg_collection.tp.rank()]
        return embedded.masked_fill(is_padding.to(embedded.device)[:, None, None], 0.0)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        token_rows: Tensor | None = None,
        num_padding: int = 0,
    ) -> Tensor:
        """Communicates over tp (not pp). Hidden states [S, B, H] ([S/tp, B, H] with sp), normed on the last stage.

        input_ids [B, S]; position_ids [S] shared by the batch. Packed: B = 1, S holds all rows. Stages after the first
        take their input from `set_input_tensor` and ignore input_ids. With cp the stream is given whole, and the result
        is of this rank's part. `token_rows` [1, S] makes routers of experts count: the row of each token of the whole
        stream, -1 for padding. The last `num_padding` tokens of the stream enter the layers as zeros.
        """
        context, num_tokens = self.pg_collection.cp, len(position_ids)
        held = torch.arange(num_tokens)
        if context.size() > 1:
            held = held_tokens(num_tokens, context.size(), context.rank()).to(position_ids.device)
            input_ids, position_ids = input_ids[:, held], position_ids[held]
        embedded = self.embed(input_ids, position_ids) if self.pre_process else None
        if num_padding and embedded is not None:
            embedded = self._without_padding(embedded, held >= num_tokens - num_padding)
        if self.config.recompute_granularity and embedded is not None and torch.is_grad_enabled():
            # What is computed again gets no gradient unless its input asks for one, which a frozen embedding does not.
            embedded.requires_grad_()
        return self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=self.rotary(position_ids),
            packed_seq_params=packed_seq_params,
            padding_mask=token_rows,  # see ExpertLayer.forward
        )
