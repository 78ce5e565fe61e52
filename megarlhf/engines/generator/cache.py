"""Keys and values of the sequences in flight: one block for all layers of this stage, a slot per sequence.

Slots 0 .. A-1 are active, so that decoding reads plain views of the first A slots and of the longest active length. A
slot that is vacated is filled from the last active one.
"""

import torch

from megarlhf.models.architecture import kv_cache_shape
from megarlhf.models.build import Model


class Cache:
    """Keys (after rotary embedding) and values, [layers, 2, slots, kv_groups/tp, capacity, head_dim].

    In the model's precision; in float32 on a CPU, which attends quicker to that (attention.py).
    """

    def __init__(self, model: Model, num_slots: int, capacity: int):
        """`capacity`: tokens of the longest sequence. Memory is zeroed: masked positions must still be finite."""
        groups, parameter = model.groups, next(model.chunks[0].parameters())
        shape = kv_cache_shape(model.architecture, groups.layout, groups.coordinates.pp, num_slots, capacity)
        dtype = torch.float32 if parameter.device.type == "cpu" else parameter.dtype
        self.blocks = torch.zeros(shape, dtype=dtype, device=parameter.device)
        self.rows = [block.view(-1, shape[-1]) for block in self.blocks]
        """Of each layer: keys of all slots and groups, token by token, then their values, [rows, head_dim]."""

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self.blocks.numel() * self.blocks.element_size()

    def places(self, lengths: torch.Tensor) -> torch.Tensor:
        """Where the next key and value of slots 0 .. A-1, which hold `lengths` [A] tokens, go: [A * kv_groups/tp * 2].

        Numbers of a layer's `rows`; the same in every layer.
        """
        _, _, num_slots, groups, capacity, _ = self.blocks.shape
        device = lengths.device
        rows = torch.arange(len(lengths), device=device)[:, None] * groups + torch.arange(groups, device=device)
        keys = rows * capacity + lengths[:, None]
        return torch.stack([keys, keys + num_slots * groups * capacity], -1).flatten()

    def append(self, layer: int, keys_values: torch.Tensor, places: torch.Tensor) -> None:
        """Writes a token of each active slot: `keys_values` [A, kv_groups/tp, 2, head_dim] at `places`, as above."""
        rows = self.rows[layer]
        rows.index_copy_(0, places, keys_values.reshape(len(places), -1).to(rows.dtype))

    def read(self, layer: int, num_active: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of keys and values [A, kv_groups/tp, length, head_dim] of the active slots."""
        keys, values = self.blocks[layer]
        return keys[:num_active, :, :length], values[:num_active, :, :length]

    def fill(self, slots: torch.Tensor, prompts: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copies prefilled `blocks` [layers, 2, P, kv_groups/tp, L, head_dim] of prompt `prompts[i]` to `slots[i]`."""
        self.blocks[:, :, slots, :, : blocks.shape[4]] = blocks[:, :, prompts].to(self.blocks.dtype)

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of one slot to another."""
        self.blocks[:, :, target, :, :length] = self.blocks[:, :, source, :, :length]
