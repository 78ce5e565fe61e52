"""Rotary frequencies as transformers computes them, for every kind of scaling that an architecture may name."""

import torch
from torch import Tensor

from megarlhf.models.architecture import Architecture
from megarlhf.models.rope_config import Rope


def inverse_frequencies(architecture: Architecture, rope: Rope) -> tuple[Tensor, float]:
    """(frequencies [R/2] float32 on the host, factor of cosine and sine), R the rotated part of a head.

    Unscaled: theta ** (-2i / R) and 1. Scaled: by transformers' own function. megatron-core knows only llama3 scaling
    with fixed constants; a config with others would be silently wrong.
    """
    dim = int(architecture.head_dim * rope.fraction)
    if rope.kind == "default":
        return 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim), 1.0
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
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
    return frequencies.float(), float(factor)


def rotary_angles(inverse: Tensor, positions: Tensor) -> Tensor:
    """inverse [K, R/2] and positions [N] -> angles [K, N, 1, 1, R] in float32, K for the ropes of a model.

    Each is as megatron-core's attention takes it.
    """
    angles = positions.float()[None, :, None] * inverse[:, None, :]
    return torch.cat((angles, angles), dim=-1)[:, :, None, None, :]
