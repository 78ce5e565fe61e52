import json
import shutil

import pytest
import torch

from megarlhf.models.forward import full_logits, packed_forward
from tests import tiny
from tests.models.helpers import load, random_rows, reference_logits, stream

VARIANTS = {
    "untied": {},
    "tied": {"tied": True},
    "llama3": {"llama3": True, "tied": True},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "one group": {"num_key_value_heads": 1},
    "no groups": {"num_key_value_heads": 4},
    "head_dim = hidden / heads": {"head_dim": 8},
}


def logits(folder, groups, rows):
    model = load(folder, groups)
    with torch.no_grad():
        return full_logits(model, packed_forward(model.chunks[0], stream(rows)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant, alone, tmp_path):
    folder = tiny.write_llama(tmp_path, **VARIANTS[variant])
    rows = random_rows()
    assert torch.allclose(logits(folder, alone, rows), reference_logits(folder, rows), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "field", [{"rms_norm_eps": 1e-3}, {"rope_theta": 100.0}, {"rope_scaling": dict(tiny.LLAMA3_ROPE)}]
)
def test_a_wrong_constant_in_the_config_would_be_caught(field, plain, alone, tmp_path):
    wrong = shutil.copytree(plain, tmp_path / "wrong")
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({**config, **field}))
    rows = random_rows()
    assert (logits(wrong, alone, rows) - reference_logits(plain, rows)).abs().max() > 1e-3


def test_packed_rows_equal_separate_rows(plain, alone):
    rows = random_rows()
    separate = torch.cat([logits(plain, alone, [row]) for row in rows])
    assert torch.allclose(logits(plain, alone, rows), separate, atol=1e-5, rtol=0)


def test_a_row_does_not_depend_on_its_batch_mates(plain, alone):
    first, *others = random_rows()
    changed = [(row + 1) % tiny.VOCAB for row in others]
    both = [logits(plain, alone, [first, *rest])[: len(first)] for rest in (others, changed)]
    assert torch.equal(*both)


def test_a_plain_batch_equals_packed_rows(plain, alone):
    rows = random_rows((6, 6))
    model = load(plain, alone)
    with torch.no_grad():
        batch = model.chunks[0](input_ids=torch.stack(rows), position_ids=torch.arange(6))
        packed = packed_forward(model.chunks[0], stream(rows))
    assert torch.allclose(batch.transpose(0, 1).reshape(12, -1), packed[:, 0], atol=1e-5)


def test_dropout_is_off_so_that_training_passes_are_identical(plain, alone):
    model = load(plain, alone)
    assert model.config.hidden_dropout == model.config.attention_dropout == 0
    model.chunks[0].train()
    passes = [packed_forward(model.chunks[0], stream(random_rows())) for _ in range(2)]
    assert torch.equal(*passes)


def test_gradients_equal_transformers(tied, alone):
    import transformers

    rows = random_rows()
    model = load(tied, alone)
    targets = torch.arange(sum(map(len, rows))) % tiny.VOCAB
    found = full_logits(model, packed_forward(model.chunks[0], stream(rows)))
    torch.nn.functional.cross_entropy(found, targets).backward()
    peer = transformers.AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32)
    expected = torch.cat([peer(row[None]).logits[0] for row in rows])
    torch.nn.functional.cross_entropy(expected, targets).backward()
    weights = dict(model.named_parameters())
    pairs = {
        "embedding.word_embeddings.weight": peer.model.embed_tokens.weight,
        "decoder.layers.0.self_attention.linear_proj.weight": peer.model.layers[0].self_attn.o_proj.weight,
        "decoder.layers.3.mlp.linear_fc2.weight": peer.model.layers[3].mlp.down_proj.weight,
        "decoder.final_layernorm.weight": peer.model.norm.weight,
    }
    for name, weight in pairs.items():
        assert torch.allclose(weights[0, name].grad, weight.grad, atol=1e-6, rtol=1e-4), name


def test_bfloat16_is_as_close_to_float32_as_transformers_is(plain, alone):
    import transformers

    rows = random_rows()
    exact = reference_logits(plain, rows)
    model = load(plain, alone, dtype=torch.bfloat16)
    peer = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    with torch.no_grad():
        ours = full_logits(model, packed_forward(model.chunks[0], stream(rows))).float() - exact
        theirs = torch.cat([peer(row[None]).logits[0] for row in rows]).float() - exact
    assert ours.pow(2).mean() < 2 * theirs.pow(2).mean()
