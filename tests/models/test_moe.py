"""Experts shared out over ranks say what transformers says; wrong routing would be seen; the balance loss is a sum."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarlhf.config.layout import Layout
from megarlhf.errors import CheckpointError
from megarlhf.models.architecture import Architecture, layout_violations
from megarlhf.models.forward import full_logits, packed_forward
from megarlhf.models.moe import rows_of_tokens
from tests import tiny
from tests.distributed.pool import run_on_ranks
from tests.models.helpers import load, load_on_rank, random_rows, reference_logits, stream, through_stages

LAYOUTS = {
    "mixtral": [Layout(ep=2), Layout(ep=4), Layout(tp=2, ep=4), Layout(tp=2, pp=2, ep=2, sp=True)],
    "qwen3_moe": [Layout(ep=2), Layout(tp=2, ep=2), Layout(tp=2, sp=True, ep=2), Layout(pp=2, ep=2)],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    top = tmp_path_factory.mktemp("mixtures")
    return {family: tiny.write_llama(top / family, family=family) for family in LAYOUTS}


@torch.no_grad()
def logits(folder, groups, rows):
    model = load(folder, groups)
    return full_logits(model, packed_forward(model.chunks[0], stream(rows)))


@torch.no_grad()
def logits_on_rank(rank, world_size, folders, rows):
    found = {}
    for family, layouts in LAYOUTS.items():
        for layout in layouts:
            model = load_on_rank(world_size, folders[family], layout)
            hidden = through_stages(model, stream(rows))
            if hidden is not None:
                found[family, layout] = full_logits(model, hidden)
    return found


def test_logits_equal_transformers_under_expert_parallelism(folders):
    rows = random_rows()
    expected = {family: reference_logits(folder, rows) for family, folder in folders.items()}
    ranks = run_on_ranks(4, logits_on_rank, folders, rows)
    assert len({key for rank in ranks for key in rank}) == sum(map(len, LAYOUTS.values()))
    for rank in ranks:
        for (family, layout), found in rank.items():
            scale = expected[family].abs().max()
            assert (found - expected[family]).abs().max() <= 1e-5 * scale, (family, layout)


@pytest.mark.parametrize("family", LAYOUTS)
def test_logits_are_transformers_to_five_digits(family, folders, alone):
    rows = random_rows()
    expected = reference_logits(folders[family], rows)
    assert (logits(folders[family], alone, rows) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("family", LAYOUTS)
def test_swapped_experts_would_be_caught(family, folders, alone, tmp_path):
    wrong = shutil.copytree(folders[family], tmp_path / "wrong")
    weights = load_file(wrong / "model.safetensors")
    swapped = {name: name.replace("experts.0.", "experts.x.").replace("experts.1.", "experts.0.") for name in weights}
    swapped = {name: other.replace("experts.x.", "experts.1.") for name, other in swapped.items()}
    save_file({swapped[name]: weights[name] for name in weights}, wrong / "model.safetensors")
    rows = random_rows()
    assert (logits(wrong, alone, rows) - reference_logits(folders[family], rows)).abs().max() > 1e-2


@pytest.mark.parametrize("fields", [{"norm_topk_prob": False}, {"num_experts_per_tok": 2}, {"num_experts_per_tok": 4}])
def test_wrong_routing_would_be_caught(fields, folders, alone, tmp_path):
    wrong = shutil.copytree(folders["qwen3_moe"], tmp_path / "wrong")
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({**config, **fields}))
    rows = random_rows()
    assert (logits(wrong, alone, rows) - reference_logits(folders["qwen3_moe"], rows)).abs().max() > 1e-2


def balance_by_hand(scores, chosen, rows, num_rows):
    """DeepSeek-V3's equations 17 to 20 with loops."""
    total, (_, experts) = torch.zeros(()), scores.shape
    for row in range(num_rows):
        mine = [t for t in range(len(scores)) if rows[t] == row]
        for e in range(experts):
            frequency = experts * sum(e in chosen[t].tolist() for t in mine) / (chosen.shape[1] * len(mine))
            total = total + frequency * torch.stack([scores[t, e] for t in mine]).mean()
    return total


def test_the_balance_loss_is_its_formula_and_its_gradient_reaches_the_router(folders, alone):
    model, rows = load(folders["qwen3_moe"], alone), random_rows((5, 3, 2))
    packed, seen = stream(rows), {}
    layers = [layer.mlp.router for layer in model.chunks[0].decoder.layers]
    for router in layers:
        router.register_forward_hook(lambda router, inputs, output: seen.update({router.layer_number: inputs[0]}))
    model.tally.balance_coef = 0.5
    model.tally.start(num_sequences=7)
    hidden = packed_forward(model.chunks[0], packed, counted_rows=2)  # the third row is padding
    (0.0 * hidden.sum()).backward()
    where = rows_of_tokens(packed.cu_seqlens, 2)[0]
    assert where.tolist() == [0] * 5 + [1] * 3 + [-1] * 2
    for router in layers:
        weight = router.weight.detach().clone().requires_grad_()
        scores = torch.softmax(seen[router.layer_number].detach()[:, 0] @ weight.T, -1)
        loss = balance_by_hand(scores, scores.topk(3).indices, where, 2) / 7
        assert torch.allclose(model.tally.losses[router.layer_number], loss, rtol=1e-5)
        assert model.tally.loads[router.layer_number].sum() == 8 * 3
        entropy = -(scores * scores.log())[:8].sum()
        assert torch.allclose(model.tally.entropies[router.layer_number], entropy, rtol=1e-5)
    last = layers[-1]  # the loss of a later layer reaches earlier routers too
    weight = last.weight.detach().clone().requires_grad_()
    scores = torch.softmax(seen[last.layer_number].detach()[:, 0] @ weight.T, -1)
    (0.5 * balance_by_hand(scores, scores.topk(3).indices, where, 2) / 7).backward()
    assert torch.allclose(last.weight.grad, weight.grad, rtol=1e-4, atol=1e-7)


def test_nothing_is_counted_while_scoring(folders, alone):
    model, rows = load(folders["mixtral"], alone), random_rows()
    with torch.no_grad():
        packed_forward(model.chunks[0], stream(rows), counted_rows=4)
    model.chunks[0].eval()
    packed_forward(model.chunks[0], stream(rows), counted_rows=4)
    assert not model.tally.loads


def test_layers_with_experts_are_those_of_transformers():
    import transformers

    fields = {"num_hidden_layers": 7, "decoder_sparse_step": 2, "mlp_only_layers": [3], "num_experts": 4}
    config = tiny.tiny_config(family="qwen3_moe", **fields)
    found = Architecture.from_hf(config)
    with torch.device("meta"):
        peer = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    sparse = [i for i, layer in enumerate(peer.model.layers) if "Sparse" in type(layer.mlp).__name__]
    assert list(found.mixture.layers) == sparse == [1, 5]
    assert found.num_dense_layers == 5


@pytest.mark.parametrize("family", LAYOUTS)
def test_absent_fields_of_experts_take_the_defaults_of_transformers(family):
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 8}
    found = Architecture.from_hf({"model_type": family, **sizes, "vocab_size": 9}).mixture
    peer = transformers.AutoConfig.for_model(family, **sizes)
    assert found.num_experts == getattr(peer, "num_experts", None) or peer.num_local_experts
    assert found.top_k == peer.num_experts_per_tok
    assert found.ffn_hidden_size == getattr(peer, "moe_intermediate_size", 40)
    assert found.normalises == getattr(peer, "norm_topk_prob", True)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 is more than the 6 experts"),
        ({"decoder_sparse_step": 9}, "leave no layer with experts"),
        ({"num_experts": 0}, "field num_experts is 0"),
        ({"mlp_only_layers": "1"}, "field mlp_only_layers is '1'"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise 0.1 is not supported"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(fields, words):
    with pytest.raises(CheckpointError, match=words):
        Architecture.from_hf(tiny.tiny_config(family="qwen3_moe", **fields))


def test_layouts_that_cannot_hold_the_experts_are_refused():
    moe, dense = (Architecture.from_hf(tiny.tiny_config(family=family)) for family in ("qwen3_moe", "llama"))
    assert layout_violations(moe, Layout(ep=6), "actor.train") == []
    (found,) = layout_violations(moe, Layout(ep=4), "actor.train")
    assert found == "actor.train: ep 4 does not divide 6 experts; choose among 1, 2, 3, 6"
    (found,) = layout_violations(dense, Layout(ep=2), "actor.train")
    assert "llama models have no experts; set ep to 1" in found
    mixtral = Architecture.from_hf(tiny.tiny_config(family="mixtral", intermediate_size=55))
    assert layout_violations(mixtral, Layout(tp=2), "actor.train") == [], "tensor ranks do not cut experts"
