"""The same model under several layouts, on real ranks, gives one answer."""

import pytest
import torch
import torch.distributed as dist

from megarlhf.config.layout import Layout
from megarlhf.models.forward import full_logits, packed_forward, values, vocabulary_logprobs
from tests import tiny
from tests.distributed.pool import run_on_ranks
from tests.models.helpers import load, load_on_rank, random_rows, reference_logits, stream, through_stages

LAYOUTS = {
    "tp2": (2, Layout(tp=2)),
    "pp2": (2, Layout(pp=2)),
    "tp2+sp": (2, Layout(tp=2, sp=True)),
    "tp4, 2 groups": (4, Layout(tp=4)),
    "tp4+sp, 2 groups": (4, Layout(tp=4, sp=True)),
    "pp4": (4, Layout(pp=4)),
    "tp2 pp2+sp": (4, Layout(tp=2, pp=2, sp=True)),
}
WATCHED = (
    "embedding.word_embeddings.weight",
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.0.input_layernorm.weight",
    "decoder.final_layernorm.weight",
    "value_head.weight",
)


def logits_on_rank(rank, world_size, folder, layout, rows):
    model = load_on_rank(world_size, folder, layout)
    with torch.no_grad():
        hidden = through_stages(model, stream(rows))
        return None if hidden is None else full_logits(model, hidden)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", ["plain", "tied"])
def test_logits_equal_transformers_under_every_layout(name, kind, request):
    folder, rows = request.getfixturevalue(kind), random_rows()
    expected = reference_logits(folder, rows)
    world_size, layout = LAYOUTS[name]
    answers = [
        answer for answer in run_on_ranks(world_size, logits_on_rank, folder, layout, rows) if answer is not None
    ]
    assert len(answers) == world_size // layout.pp
    for answer in answers:
        assert answer.shape == (24, tiny.VOCAB), "padded vocabulary columns are not seen outside"
        assert torch.allclose(answer, expected, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def five_layers(tmp_path_factory):
    return tiny.write_llama(tmp_path_factory.mktemp("models") / "five", num_hidden_layers=5, tied=True)


def test_uneven_stages_run_every_layer_once(five_layers):
    rows = random_rows()
    *_, answer = run_on_ranks(2, logits_on_rank, five_layers, Layout(pp=2), rows)
    assert torch.allclose(answer, reference_logits(five_layers, rows), atol=1e-4, rtol=0)


def scores(model, head, rows):
    hidden = packed_forward(model.chunks[0], stream(rows))
    positions = torch.tensor([2, 9, 11, 20])
    if head == "value":
        return values(model, hidden, positions)
    logp, entropy = vocabulary_logprobs(model, hidden, positions, positions, 0.8, with_entropy=True)
    return logp + 0.3 * entropy


def gradients(model):
    """Whole gradients of the watched weights: pieces of tensor ranks joined, sums where tokens were divided."""
    found, group = {}, model.groups.tp
    for (_, name), weight in model.named_parameters().items():
        if name not in WATCHED:
            continue
        pieces = [torch.empty_like(weight.grad) for _ in range(group.size())]
        dist.all_gather(pieces, weight.grad.contiguous(), group=group)
        if getattr(weight, "tensor_model_parallel", False):
            found[name] = torch.cat(pieces)
        else:
            found[name] = sum(pieces) if getattr(weight, "sequence_parallel", False) else pieces[0]
    return found


def learn_on_rank(rank, world_size, folder, layout, head, rows):
    model = load_on_rank(world_size, folder, layout, head)
    found = scores(model, head, rows)
    (found * torch.arange(1.0, 5.0)).sum().backward()
    return found.detach(), gradients(model)


@pytest.mark.parametrize("name", ["tp2", "tp2+sp", "tp4, 2 groups", "tp4+sp, 2 groups"])
@pytest.mark.parametrize("head", ["vocabulary", "value"])
def test_scores_and_their_gradients_equal_one_rank(name, head, request, alone):
    folder, rows = request.getfixturevalue("plain" if head == "vocabulary" else "judge"), random_rows()
    model = load(folder, alone, head)
    expected = scores(model, head, rows)
    (expected * torch.arange(1.0, 5.0)).sum().backward()
    whole = gradients(model)
    world_size, layout = LAYOUTS[name]
    for found, joined in run_on_ranks(world_size, learn_on_rank, folder, layout, head, rows):
        assert torch.allclose(found, expected, atol=1e-5)
        assert joined.keys() == whole.keys()
        for weight in whole:
            size = whole[weight].shape[0]  # without the padded vocabulary rows
            difference = (joined[weight][:size] - whole[weight]).norm() / whole[weight].norm()
            assert difference < 1e-5, f"{weight} differs by {difference}"
