import pytest
import torch

from megarlhf.models.architecture import Architecture
from megarlhf.models.rope import inverse_frequencies, rotary_angles
from tests import tiny

SCALINGS = [
    None,
    {"rope_type": "linear", "factor": 3.0},
    dict(tiny.LLAMA3_ROPE),
    {**tiny.LLAMA3_ROPE, "factor": 32.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_are_those_of_transformers(scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = tiny.tiny_config(rope_scaling=scaling)
    rotary = LlamaRotaryEmbedding(LlamaConfig(**{**config, "architectures": None}))
    assert torch.equal(inverse_frequencies(Architecture.from_hf(config)), rotary.inv_freq)


def test_llama3_scaling_matches_its_definition():
    """Wavelengths beyond original/low are stretched by factor, below original/high kept, between them blended."""
    architecture = Architecture.from_hf(tiny.tiny_config(llama3=True))
    low, high, original, factor = 1.0, 3.0, 16, 4.0
    for index, found in enumerate(inverse_frequencies(architecture).tolist()):
        plain = 5000.0 ** (-2 * index / tiny.HEAD_DIM)
        turns = original * plain / (2 * torch.pi)
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        assert found == pytest.approx(plain * ((1 - blend) / factor + blend), rel=1e-5)


def test_angles_are_position_times_frequency_twice():
    angles = rotary_angles(torch.tensor([1.0, 0.1]), torch.tensor([0, 3]))
    assert angles.shape == (2, 1, 1, 4)
    assert torch.allclose(angles[1, 0, 0], torch.tensor([3.0, 0.3, 3.0, 0.3]))
