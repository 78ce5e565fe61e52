"""Rotary frequencies as transformers computes them, for every kind of scaling that an architecture may name."""

import torch
from torch import Tensor

from megarlhf.models.architecture import Architecture


def inverse_frequencies(architecture: Architecture) -> Tensor:
    """[D/2] float32 on the host: theta ** (-2i / D), scaled by transformers' own function where scaling is asked for.

    megatron-core knows only llama3 scaling with fixed constants; a config with others would be silently wrong.
    """
    rope, dim = architecture.rope, architecture.head_dim
    if rope.kind == "default":
        return 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # The spelling of transformers 4, which 5 converts.
    config = LlamaConfig(
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_heads,
        head_dim=dim,
        max_position_embeddings=architecture.max_positions,
        rope_theta=rope.theta,
        rope_scaling={"rope_type": rope.kind, **dict(rope.parameters)},
    )
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
    assert attention_factor == 1.0, f"rope {rope.kind} scales attention by {attention_factor}"
    return frequencies.float()


def rotary_angles(inverse: Tensor, positions: Tensor) -> Tensor:
    """inverse [D/2] and positions [N] -> angles [N, 1, 1, D] in float32, as megatron-core's attention takes them."""
    angles = torch.outer(positions.float(), inverse)
    return torch.cat((angles, angles), dim=-1)[:, None, None, :]
