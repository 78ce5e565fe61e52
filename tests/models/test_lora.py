"""Adapters beside frozen weights: the function, its gradient, and what is left untouched."""

import pytest
import torch

from megarlhf.config.lora import LINEARS, LoRA
from megarlhf.errors import ConfigError
from megarlhf.models.forward import full_logits, packed_forward, vocabulary_logprobs
from megarlhf.models.lora import (
    adapter_parameters,
    adapters,
    adapters_off,
    add_lora,
    base_parameters,
    merged_parameters,
)
from tests import tiny
from tests.models.helpers import load, random_rows, stream

JOINED_LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
LORA = LoRA(rank=3, alpha=7.0)
SOME = LoRA(rank=2, alpha=4.0, targets=("q_proj", "v_proj", "up_proj"))


def disturb(model, seed=5):
    """Adapters as training might leave them: B no longer zero where a projection has one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for adapter in adapters(model).values():
            has_one = adapter.owner.any(1, keepdim=True)
            adapter.b.copy_(0.1 * torch.randn(adapter.b.shape, generator=generator) * has_one)
    return model


def adapted_model(folder, groups, lora=LORA, head="vocabulary"):
    model = load(folder, groups, head)
    add_lora(model, lora)
    return disturb(model)


@torch.no_grad()
def logits(model):
    return full_logits(model, packed_forward(model.chunks[0], stream(random_rows())))


def put(model, tensors):
    """Overwrite a model's weights by those of a mapping."""
    with torch.no_grad():
        for key, parameter in base_parameters(model).items():
            parameter.copy_(tensors[key])
    return model


def test_fresh_adapters_change_no_bit_of_the_logits(plain, alone):
    model = load(plain, alone)
    before = logits(model)
    add_lora(model, LORA)
    assert len(adapters(model)) == 4 * tiny.LAYERS
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("lora", [LORA, SOME], ids=["all linears", "some"])
def test_merged_weights_compute_what_the_adapters_compute(lora, plain, alone):
    model = adapted_model(plain, alone, lora)
    merged = put(load(plain, alone), merged_parameters(model))
    assert (logits(model) - logits(load(plain, alone))).abs().max() > 0.1
    assert torch.allclose(logits(model), logits(merged), atol=1e-5, rtol=1e-5)


def test_merging_leaves_the_weights_as_they_are(plain, alone):
    model = adapted_model(plain, alone)
    for key, tensor in merged_parameters(model).items():
        assert torch.equal(tensor, base_parameters(model)[key]) == (key not in adapters(model))
    original = load(plain, alone).named_parameters()
    assert base_parameters(model).keys() == original.keys()
    assert all(torch.equal(parameter, original[key]) for key, parameter in base_parameters(model).items())


def test_a_model_without_adapters_merges_into_itself(plain, alone):
    model = load(plain, alone)
    merged = merged_parameters(model)
    assert len(merged) == len(model.named_parameters())
    assert all(merged[key] is parameter for key, parameter in model.named_parameters().items())


def test_with_adapters_off_the_model_is_the_one_it_was(plain, alone):
    model = adapted_model(plain, alone)
    with_adapters, base = logits(model), logits(load(plain, alone))
    with adapters_off(model):
        assert torch.equal(logits(model), base)
        with adapters_off(model):
            assert torch.equal(logits(model), base)
        assert torch.equal(logits(model), base), "an inner block does not switch them on"
    assert torch.equal(logits(model), with_adapters)
    with pytest.raises(KeyError), adapters_off(model):
        raise KeyError
    assert torch.equal(logits(model), with_adapters)


def trainable(model):
    return {key for key, parameter in model.named_parameters().items() if parameter.requires_grad}


def test_only_adapters_are_trained_and_of_a_value_model_its_head(plain, judge, alone):
    model, value = adapted_model(plain, alone), adapted_model(judge, alone, head="value")
    assert trainable(model) == adapter_parameters(model).keys()
    assert trainable(value) == adapter_parameters(value).keys() | {(0, "value_head.weight")}


def log_probability(model):
    hidden = packed_forward(model.chunks[0], stream(random_rows()))
    positions = torch.tensor([2, 9, 11, 20])
    return vocabulary_logprobs(model, hidden, positions, positions, 0.8, with_entropy=False)[0].sum()


def test_gradients_are_those_of_the_merged_weights_by_the_chain_rule(plain, alone):
    """W' = W + s B A: the gradient of A is s B^T dW', that of B is s dW' A^T, projection by projection."""
    model = adapted_model(plain, alone)
    log_probability(model).backward()
    merged = put(load(plain, alone), merged_parameters(model))
    log_probability(merged).backward()
    for key, adapter in adapters(model).items():
        whole = merged.named_parameters()[key].grad
        for place in range(len(adapter.projections)):
            rows, mine = slice(place * adapter.rank, (place + 1) * adapter.rank), adapter.owner[:, place] == 1
            a, b = adapter.a[rows], adapter.b[mine]
            expected_a, expected_b = adapter.scale * b.T @ whole[mine], adapter.scale * whole[mine] @ a.T
            assert (adapter.a.grad[rows] - expected_a).norm() <= 1e-4 * expected_a.norm(), adapter.projections[place]
            assert (adapter.b.grad[mine] - expected_b).norm() <= 1e-4 * expected_b.norm(), adapter.projections[place]
    assert all(parameter.grad is None for parameter in base_parameters(model).values())


def test_rows_of_projections_without_adapter_get_no_gradient(plain, alone):
    model = adapted_model(plain, alone, SOME)
    log_probability(model).backward()
    qkv = adapters(model)[0, "decoder.layers.0.self_attention.linear_qkv.weight"]
    is_key = qkv.owner.sum(1) == 0
    assert is_key.sum() == tiny.GROUPS * tiny.HEAD_DIM
    assert not qkv.b.grad[is_key].any() and qkv.b.grad[~is_key].any(1).all()


@pytest.mark.parametrize(
    "lora,words",
    [
        (LoRA(rank=4, targets=("q_proj", "lm_head")), "lora.targets: lm_head cannot have an adapter"),
        (LoRA(rank=4, targets=()), "lora.targets: is empty"),
        (LoRA(rank=4, alpha=0.0), "lora.alpha: 0.0 is out of range; choose more than 0, such as 8"),
        (LoRA(rank=-1), "lora.rank: -1 is out of range"),
        (LoRA(), "lora.rank: 0 adds no adapters"),
    ],
)
def test_settings_that_cannot_be_are_refused(lora, words, plain, alone):
    model = load(plain, alone)
    with pytest.raises(ConfigError, match=words):
        add_lora(model, lora)
    assert all(parameter.requires_grad for parameter in model.named_parameters().values())


def test_a_target_that_the_model_lacks_is_refused_by_name(alone, tmp_path):
    model = load(tiny.write_llama(tmp_path, family="phi3", num_hidden_layers=1), alone)
    with pytest.raises(ConfigError, match="q_proj, k_proj, v_proj, gate_proj, up_proj are no linear layers of phi3"):
        add_lora(model, LoRA(rank=4))


def test_the_words_for_targets_are_the_linears_of_every_family():
    from megarlhf.models.families import FAMILIES
    from megarlhf.models.lora import adapted

    for kind, family in FAMILIES.items():
        words = JOINED_LINEARS if kind == "phi3" else LINEARS
        named = [name for weight in family.layer for name in adapted(weight, LoRA(rank=1, targets=words))]
        assert sorted(name.split(".")[-2] for name in named) == sorted(words)
