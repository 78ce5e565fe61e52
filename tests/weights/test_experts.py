"""Weights of experts, shared out over ranks: the same bytes after every way through layouts and Megatron's files."""

import pytest
import torch
from safetensors.torch import load_file

from megarlhf.config.layout import Layout
from megarlhf.models.architecture import Architecture
from megarlhf.models.build import build_model
from megarlhf.parallel.groups import build_groups
from megarlhf.weights.convert import write_hugging_face, write_megatron
from megarlhf.weights.exchange import Resharder
from megarlhf.weights.export import export_model
from megarlhf.weights.load import load_weights
from megarlhf.weights.plan import holdings, reshard_plan, validate
from tests import tiny
from tests.distributed.pool import run_on_ranks
from tests.weights.test_torch_dist import differing_after_megatron_loads, sharded_state

LAYOUTS = [Layout(ep=2), Layout(ep=4), Layout(tp=2, ep=2), Layout(tp=4, ep=2), Layout(pp=2, ep=2), Layout(tp=2, ep=4)]
KINDS = {
    "mixtral": {"family": "mixtral"},
    "value": {"family": "mixtral", "num_labels": 1},
    "dense layers too": {"family": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [1], "tied": True},
}


def model_of(folder, layout, world_size):
    architecture, groups = Architecture.from_folder(folder), build_groups(layout, world_size)
    head = "value" if architecture.num_labels else "vocabulary"
    return build_model(architecture, groups, head=head, dtype=torch.float32, seed=None)


def round_trips_on_rank(rank, world_size, folders, top):
    for kind, folder in folders.items():
        models = [model_of(folder, layout, world_size) for layout in LAYOUTS]
        for model, layout in zip(models, LAYOUTS, strict=True):
            load_weights(model, folder)
            export_model(model, top / f"{kind}_{layout}", source_folder=folder)
        for number, (source, target) in enumerate(zip(models, models[1:] + models[:1], strict=True)):
            for parameter in target.named_parameters().values():
                parameter.data.zero_()
            Resharder(source, target).run()
            export_model(target, top / f"{kind}_resharded{number}", source_folder=folder)


def test_round_trips_and_reshards_keep_every_bit(tmp_path):
    folders = {kind: tiny.write_llama(tmp_path / f"from {kind}", seed=3, **KINDS[kind]) for kind in KINDS}
    run_on_ranks(4, round_trips_on_rank, folders, tmp_path)
    for kind, folder in folders.items():
        expected = load_file(folder / "model.safetensors")
        for way in [*LAYOUTS, *(f"resharded{number}" for number in range(len(LAYOUTS)))]:
            found = load_file(tmp_path / f"{kind}_{way}" / "model.safetensors")
            assert found.keys() == expected.keys(), (kind, way)
            assert all(torch.equal(found[name], expected[name]) for name in expected), (kind, way)


def test_a_new_model_has_the_same_weights_on_all_ranks_that_share_an_expert(tmp_path):
    folder = tiny.write_llama(tmp_path, family="mixtral")
    alone = run_on_ranks(1, fresh_on_rank, folder, Layout())[0]
    for layout in (Layout(tp=2, ep=2), Layout(ep=4), Layout(pp=2, tp=2)):
        for rank in run_on_ranks(4, fresh_on_rank, folder, layout):
            assert rank and all(torch.equal(values, alone[name]) for name, values in rank.items()), layout


def fresh_on_rank(rank, world_size, folder, layout):
    from megarlhf.weights.local_map import local_map

    groups = build_groups(layout, world_size)
    model = build_model(Architecture.from_folder(folder), groups, head="vocabulary", dtype=torch.float32, seed=5)
    pieces = local_map(model.architecture, layout, groups.coordinates, "vocabulary")
    parameters = model.named_parameters()
    return {
        tensor.pieces[0].hf_name: parameters[key].detach().clone()
        for key, tensor in pieces.items()
        if "mlp.experts" in key[1] or "router" in key[1]
    }


def layout_pairs():
    cuts = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (2, 4)]
    layouts = [Layout(tp=tp, pp=pp, ep=ep) for tp, pp in cuts for ep in (1, 2, 3, 4, 6, 12)]
    return [(one, other) for place, one in enumerate(layouts) for other in layouts[place % 5 :: 5]]


def test_a_reshard_plan_writes_each_element_of_each_expert_once():
    """Over more than 200 pairs of layouts."""
    sizes = {
        "num_experts": 12,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 8,
        "vocab_size": 13,
    }
    architecture = Architecture.from_hf(tiny.tiny_config(family="qwen3_moe", moe_intermediate_size=2, **sizes))
    pairs = layout_pairs()
    assert len(pairs) > 200
    for source, target in pairs:
        world = 1
        while world % source.smallest_world or world % target.smallest_world:
            world += 1
        validate(reshard_plan(architecture, "vocabulary", source, target, world, 4096))
        held = holdings(architecture, target, world, "vocabulary")
        experts = {piece.hf_name for holding in held for tensor in holding.values() for piece in tensor.pieces}
        assert sum(".experts." in name for name in experts) == 12 * 4 * 3


def load_elsewhere(rank, world_size, source, checkpoint, layout) -> list[str]:
    """Parameters that megatron-core's loader leaves different under expert parallelism."""
    from megatron.core import dist_checkpointing

    model, expected = (model_of(source, layout, world_size) for _ in range(2))
    load_weights(expected, source)
    model.chunks[0].load_state_dict(dist_checkpointing.load(sharded_state(model), checkpoint))
    right = expected.named_parameters()
    return [str(key) for key, value in model.named_parameters().items() if not torch.equal(value, right[key])]


@pytest.mark.parametrize("kind", ["mixtral", "dense layers too"])
def test_megatron_core_loads_what_was_written(tmp_path, single_rank, kind):
    source = tiny.write_llama(tmp_path / "hf", **KINDS[kind])
    write_megatron(source, tmp_path / "megatron", Layout(tp=2, pp=2))
    arguments = (str(source), str(tmp_path / "megatron"))
    assert differing_after_megatron_loads(0, 1, *arguments, 1, 1) == []
    for layout in (Layout(ep=2), Layout(tp=2, ep=2)):
        assert run_on_ranks(2, load_elsewhere, *arguments, layout) == [[], []]


def save_on_rank(rank, world_size, source, checkpoint, layout) -> None:
    import os

    from megatron.core import dist_checkpointing

    model = model_of(source, layout, world_size)
    load_weights(model, source)
    if rank == 0:
        os.makedirs(checkpoint)
    torch.distributed.barrier()
    dist_checkpointing.save(sharded_state(model), checkpoint)


@pytest.mark.parametrize("kind, layout", [("mixtral", Layout(ep=2)), ("dense layers too", Layout(tp=2, ep=2))])
def test_what_megatron_core_saved_is_read(tmp_path, kind, layout):
    source = tiny.write_llama(tmp_path / "hf", **KINDS[kind])
    run_on_ranks(2, save_on_rank, str(source), str(tmp_path / "megatron"), layout)
    write_hugging_face(tmp_path / "megatron", tmp_path / "back", config=source)
    left, right = (load_file(path / "model.safetensors") for path in (source, tmp_path / "back"))
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
