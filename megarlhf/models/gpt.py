"""GPT: megatron-core's GPTModel for one pipeline stage, ending in hidden states; heads are applied in forward.py."""

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megarlhf import device
from megarlhf.models.architecture import Architecture, padded_vocab, stage_layers
from megarlhf.models.heads import ValueHead
from megarlhf.models.names import Head
from megarlhf.models.rope import inverse_frequencies, rotary_angles
from megarlhf.models.spec import block_spec
from megarlhf.parallel.groups import Groups


class GPT(GPTModel):
    """The layers of one stage; the embedding on the first stage; final norm and a head's weights on the last.

    `head` "vocabulary" keeps `output_layer` (its weight is absent when tied on a single stage); "value" has
    `value_head` in its place.
    """

    def __init__(self, config: TransformerConfig, architecture: Architecture, groups: Groups, head: Head):
        layers = stage_layers(architecture, groups.layout, groups.coordinates.pp)
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(len(layers), architecture.qk_norm),
            vocab_size=padded_vocab(architecture, groups.layout),
            max_sequence_length=architecture.max_positions,
            pre_process=groups.is_first_stage,
            post_process=groups.is_last_stage,
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied and head == "vocabulary",
            position_embedding_type="rope",
            pg_collection=groups.collection,
        )
        self.rotary_pos_emb.inv_freq = inverse_frequencies(architecture).to(device.current())
        self._number_layers(layers)
        if head == "value" and groups.is_last_stage:
            del self.output_layer
            self.value_head = ValueHead(architecture.hidden_size)

    def _number_layers(self, layers: range) -> None:
        """megatron-core numbers layers from 1 with an offset that is right only when all stages are equal."""
        for layer, index in zip(self.decoder.layers, layers, strict=True):
            layer.layer_number = layer.self_attention.layer_number = index + 1
            layer.self_attention.core_attention.layer_number = index + 1

    def rotary(self, position_ids: Tensor) -> Tensor:
        """Angles [N, 1, 1, D] for positions [N], in float32."""
        return rotary_angles(self.rotary_pos_emb.inv_freq, position_ids)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, packed_seq_params: PackedSeqParams | None = None
    ) -> Tensor:
        """Communicates over tp (not pp). Hidden states [S, B, H] ([S/tp, B, H] with sp), normed on the last stage.

        input_ids [B, S]; position_ids [S] shared by the batch. Packed: B = 1, S holds all rows. Stages after the first
        take their input from `set_input_tensor` and ignore input_ids.
        """
        embedded = self.embedding(input_ids=input_ids, position_ids=position_ids) if self.pre_process else None
        if self.config.recompute_granularity and embedded is not None and torch.is_grad_enabled():
            # What is computed again gets no gradient unless its input asks for one, which a frozen embedding does not.
            embedded.requires_grad_()
        return self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=self.rotary(position_ids),
            packed_seq_params=packed_seq_params,
        )
