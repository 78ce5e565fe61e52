import torch

from megarlhf.models.forward import full_logits, packed_forward, values, vocabulary_logprobs
from tests import tiny
from tests.models.helpers import load, random_rows, reference_logits, stream

POSITIONS = torch.tensor([0, 3, 5, 8, 8, 23])
TARGETS = torch.tensor([5, 100, 0, 7, 8, 50])


def test_logprobs_and_entropy_are_those_of_tempered_logits(plain, alone):
    rows = random_rows()
    model = load(plain, alone)
    expected = (reference_logits(plain, rows)[POSITIONS] / 0.7).log_softmax(-1)
    with torch.no_grad():
        hidden = packed_forward(model.chunks[0], stream(rows))
        logp, entropy = vocabulary_logprobs(model, hidden, POSITIONS, TARGETS, 0.7, with_entropy=True)
    assert torch.allclose(logp, expected[range(len(TARGETS)), TARGETS], atol=1e-5)
    assert torch.allclose(entropy, -(expected.exp() * expected).sum(-1), atol=1e-5)


def test_logprobs_have_the_gradient_of_log_softmax(tied, alone):
    rows = random_rows()
    both = []
    for fused in (True, False):
        model = load(tied, alone)
        hidden = packed_forward(model.chunks[0], stream(rows))
        if fused:
            logp, _ = vocabulary_logprobs(model, hidden, POSITIONS, TARGETS, 1.3, with_entropy=False)
        else:
            scores = (full_logits(model, hidden)[POSITIONS] / 1.3).log_softmax(-1)
            logp = scores[range(len(TARGETS)), TARGETS]
        (logp * torch.arange(1, 7)).sum().backward()
        both.append({name: weight.grad for name, weight in model.named_parameters().items()})
    for name in both[0]:
        assert torch.allclose(both[0][name], both[1][name], atol=1e-5, rtol=1e-4), name


def test_values_are_those_of_transformers_whatever_the_temperature(judge, alone):
    rows = random_rows()
    model = load(judge, alone, "value")
    with torch.no_grad():
        found = values(model, packed_forward(model.chunks[0], stream(rows)), torch.arange(24))
    assert found.shape == (24,) and found.dtype == torch.float32
    assert torch.allclose(found, reference_logits(judge, rows)[:, 0], atol=1e-4)


def test_a_new_value_head_answers_zero_and_is_float32_in_a_bfloat16_model(plain, alone):
    model = load(plain, alone, "value", torch.bfloat16, new_value_head=True)
    assert model.named_parameters()[0, "value_head.weight"].dtype == torch.float32
    hidden = packed_forward(model.chunks[0], stream(random_rows()))
    found = values(model, hidden, POSITIONS)
    assert found.dtype == torch.float32 and not found.any()
    found.sum().backward()
    assert model.chunks[0].value_head.weight.grad.abs().max() > 0


def test_a_value_model_of_tied_embeddings_has_no_vocabulary_head(tied, alone):
    model = load(tied, alone, "value", new_value_head=True)
    names = {name for _, name in model.named_parameters()}
    assert "value_head.weight" in names and not any("output_layer" in name for name in names)
    assert model.architecture.vocab_size == tiny.VOCAB
