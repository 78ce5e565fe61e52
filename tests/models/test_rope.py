import math

import pytest
import torch

from megarlhf.errors import CheckpointError
from megarlhf.models.architecture import Architecture
from megarlhf.models.rope import inverse_frequencies, rotary_angles
from tests import tiny

SCALINGS = [
    None,
    {"rope_type": "linear", "factor": 3.0},
    dict(tiny.LLAMA3_ROPE),
    {**tiny.LLAMA3_ROPE, "factor": 32.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 2.5, "beta_fast": 20.0, "beta_slow": 2.0, "mscale": 1.2, "mscale_all_dim": 0.5},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 0.8, "truncate": False},
]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_are_those_of_transformers(scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = tiny.tiny_config(rope_scaling=scaling)
    rotary = LlamaRotaryEmbedding(LlamaConfig(**{**config, "architectures": None}))
    architecture = Architecture.from_hf(config)
    frequencies, factor = inverse_frequencies(architecture, architecture.rope)
    assert torch.equal(frequencies, rotary.inv_freq) and factor == rotary.attention_scaling


def test_llama3_scaling_matches_its_definition():
    """Wavelengths beyond original/low are stretched by factor, below original/high kept, between them blended."""
    architecture = Architecture.from_hf(tiny.tiny_config(llama3=True))
    low, high, original, factor = 1.0, 3.0, 16, 4.0
    for index, found in enumerate(inverse_frequencies(architecture, architecture.rope)[0].tolist()):
        plain = 5000.0 ** (-2 * index / tiny.HEAD_DIM)
        turns = original * plain / (2 * torch.pi)
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        assert found == pytest.approx(plain * ((1 - blend) / factor + blend), rel=1e-5)


def test_yarn_matches_its_definition():
    """Slow dimensions are stretched by the factor, fast ones kept, with a linear ramp between (arXiv:2309.00071)."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    architecture = Architecture.from_hf(tiny.tiny_config(rope_scaling=scaling))
    found, factor = inverse_frequencies(architecture, architecture.rope)
    assert factor == pytest.approx(0.1 * math.log(4.0) + 1)
    dim = tiny.HEAD_DIM
    fast, slow = (dim * math.log(32 / (turns * 2 * math.pi)) / (2 * math.log(5000.0)) for turns in (32, 1))
    low, high = max(math.floor(fast), 0), min(math.ceil(slow), dim - 1)
    for index, frequency in enumerate(found.tolist()):
        plain = 5000.0 ** (-2 * index / dim)
        kept = 1 - min(max((index - low) / (high - low), 0.0), 1.0)
        assert frequency == pytest.approx(plain * kept + plain / 4 * (1 - kept), rel=1e-5)


def test_angles_are_position_times_frequency_twice_for_each_rope():
    angles = rotary_angles(torch.tensor([[1.0, 0.1], [2.0, 0.5]]), torch.tensor([0, 3]))
    assert angles.shape == (2, 2, 1, 1, 4)
    assert torch.allclose(angles[0, 1, 0, 0], torch.tensor([3.0, 0.3, 3.0, 0.3]))
    assert torch.allclose(angles[1, 1, 0, 0], torch.tensor([6.0, 1.5, 6.0, 1.5]))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported: the angles"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_type 'su' is not supported: the angles"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn' needs factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor of rope_type 'yarn' is '4'; expected"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one object a kind of layer is not supported"),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters full_attention is 3; expected an object"),
    ],
)
def test_what_cannot_be_built_is_refused_with_its_reason(fields, words):
    with pytest.raises(CheckpointError, match=words):
        Architecture.from_hf(tiny.tiny_config(**fields))
