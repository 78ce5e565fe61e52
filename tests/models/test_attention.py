import math

import pytest
import torch

from megarlhf.models.architecture import Architecture
from megarlhf.models.attention import Scoring, causal_attention
from megarlhf.models.segments import PackedSegments
from megarlhf.models.spec import layer_spec
from tests import tiny

QUERIES, GROUPS, SIZE = 6, 2, 5


def slow_attention(query, key, value, window=100, softcap=None, scale=SIZE**-0.5):
    """[S, heads, D], position by position and head by head, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    out = torch.zeros(query.shape[0], QUERIES, SIZE, dtype=torch.float64)
    for position in range(query.shape[0]):
        for head in range(QUERIES):
            group = head // (QUERIES // GROUPS)
            seen = range(max(position - window + 1, 0), position + 1)
            scores = [query[position, head] @ key[t, group] * scale for t in seen]
            scores = scores if softcap is None else [softcap * math.tanh(s / softcap) for s in scores]
            weights = torch.tensor(scores).softmax(0)
            out[position, head] = sum(w * value[t, group] for t, w in zip(seen, weights, strict=True))
    return out.flatten(1)


@pytest.fixture
def core(alone):
    from megatron.core.transformer.enums import AttnMaskType

    from megarlhf.config.layout import Layout
    from megarlhf.models.attention import SDPACoreAttention
    from megarlhf.models.transformer_config import transformer_config

    config = transformer_config(Architecture.from_hf(tiny.tiny_config()), Layout(), torch.float32)
    return SDPACoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=alone.collection)


def test_attention_equals_a_slow_loop_on_every_row_of_a_batch(core):
    torch.manual_seed(0)
    query = torch.randn(7, 2, QUERIES, SIZE)
    key, value = torch.randn(2, 7, 2, GROUPS, SIZE)
    found = core(query, key, value, None)
    for row in range(2):
        expected = slow_attention(query[:, row], key[:, row], value[:, row])
        assert torch.allclose(found[:, row].double(), expected, atol=1e-6)


@pytest.mark.parametrize("window", [1, 3, 4, 10, 11, 12])
def test_in_a_window_a_token_sees_itself_and_those_just_before_it(window):
    torch.manual_seed(0)
    query = torch.randn(1, QUERIES, 11, SIZE)
    key, value = torch.randn(2, 1, GROUPS, 11, SIZE)
    found = causal_attention(query, key, value, Scoring(window=window))[0].transpose(0, 1).flatten(1)
    expected = slow_attention(*(tensor[0].transpose(0, 1) for tensor in (query, key, value)), window)
    assert torch.allclose(found.double(), expected, atol=1e-6)


@pytest.mark.parametrize("scoring", [Scoring(0.7, 0.5), Scoring(None, 2.0, 3), Scoring(0.3, None, 4), Scoring(0.3)])
def test_scores_are_scaled_then_capped(scoring, monkeypatch):
    monkeypatch.setattr("megarlhf.models.attention._BLOCK_ROWS", 4)
    torch.manual_seed(0)
    query = torch.randn(1, QUERIES, 11, SIZE)
    key, value = torch.randn(2, 1, GROUPS, 11, SIZE)
    found = causal_attention(query, key, value, scoring)[0].transpose(0, 1).flatten(1)
    rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    expected = slow_attention(*rows, scoring.window or 100, scoring.softcap, scoring.scale or SIZE**-0.5)
    assert torch.allclose(found.double(), expected, atol=1e-6)


def test_packed_rows_attend_only_to_themselves(core):
    torch.manual_seed(0)
    query = torch.randn(9, 1, QUERIES, SIZE)
    key, value = torch.randn(2, 9, 1, GROUPS, SIZE)
    starts = torch.tensor([0, 4, 5, 9], dtype=torch.int32)
    packing = PackedSegments(qkv_format="sbhd", cu_seqlens_q=starts, cu_seqlens_kv=starts)
    found = core(query, key, value, None, packed_seq_params=packing)
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        expected = slow_attention(query[start:stop, 0], key[start:stop, 0], value[start:stop, 0])
        assert torch.allclose(found[start:stop, 0].double(), expected, atol=1e-6)


def test_a_layer_keeps_the_module_names_of_the_local_spec():
    submodules = layer_spec(Architecture.from_hf(tiny.tiny_config())).submodules
    assert submodules.input_layernorm is submodules.pre_mlp_layernorm
    assert submodules.self_attention.submodules.linear_qkv is not None


@pytest.mark.parametrize("scoring", [Scoring(), Scoring(window=5), Scoring(softcap=3.0), Scoring(None, 3.0, 3)])
@pytest.mark.parametrize("num_last", [1, 4, 11])
def test_the_last_tokens_of_a_row_attend_as_in_the_whole_row(scoring, num_last):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 12, 8, generator=generator)
    key, value = torch.randn(2, 1, 2, 12, 8, generator=generator).unbind()
    whole = causal_attention(query, key, value, scoring)
    part = causal_attention(query[:, :, -num_last:], key, value, scoring)
    assert torch.allclose(part, whole[:, :, -num_last:], atol=1e-6)
