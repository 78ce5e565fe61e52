"""Training adapters: one update is the same under every layout, and the model beside them does not move."""

import pytest
import torch
from safetensors.torch import load_file

from megarlhf.config.layout import Layout
from megarlhf.config.lora import LoRA
from megarlhf.config.settings import Optimizer
from tests.distributed.pool import run_on_ranks
from tests.engines.layouts import assemble, frozen_batch
from tests.tiny import write_llama

ALL, SOME = LoRA(rank=3, alpha=7.0), LoRA(rank=2, alpha=5.0, targets=("q_proj", "v_proj", "o_proj", "up_proj"))
SMOOTH = Optimizer(learning_rate=0.3, epsilon=1.0, clip_grad=0.0)
"""An epsilon as large as the gradients: otherwise Adam's first step is their sign, and rounding decides it at 0."""
LAYOUTS = {
    "tp2": (2, Layout(tp=2)),
    "pp2": (2, Layout(pp=2)),
    "tp2+sp": (2, Layout(tp=2, sp=True)),
    "dp2": (2, Layout()),
    "tp4, more than key/value groups": (4, Layout(tp=4)),
    "tp2 pp2 sp": (4, Layout(tp=2, pp=2, sp=True)),
}
MODELS = {"tied": ("vocabulary", ALL), "untied": ("vocabulary", SOME), "value": ("value", ALL)}
CASES = [("tied", case) for case in LAYOUTS] + [("untied", "tp2"), ("value", "tp2+sp"), ("value", "pp2")]


def load_adapted(world_size: int, layout: Layout, folder, lora: LoRA, head: str, adapters=None, dtype=torch.float32):
    """A model with its weights and adapters, those of the folder `adapters` if there is one."""
    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.models.lora import add_lora
    from megarlhf.parallel.groups import build_groups
    from megarlhf.weights.adapters import load_peft
    from megarlhf.weights.load import load_weights

    groups = build_groups(layout, world_size)
    model = build_model(Architecture.from_folder(folder), groups, head=head, dtype=dtype, seed=None)
    load_weights(model, folder)
    add_lora(model, lora, seed=11)
    if adapters is not None:
        load_peft(model, adapters, lora)
    return model


def squared_error(prediction, tokens, denominators):
    """A loss that needs no algorithm: how far predictions are from the batch's targets."""
    return (prediction.value - tokens.target).square().sum() / denominators.tokens, {}


def pieces(model, lora, tensor_of):
    """(PEFT's name, box, values) of every piece of `tensor_of(parameter)` that this rank trains."""
    from megarlhf.weights.adapters import adapter_map, trained_parameters
    from megarlhf.weights.boxes import slices

    trained = trained_parameters(model)
    held = adapter_map(model.architecture, model.groups.layout, model.groups.coordinates, model.head, lora)
    assert held.keys() == trained.keys()
    return [
        (piece.hf_name, piece.source, tensor_of(trained[key]).detach()[slices(piece.target)].clone())
        for key, tensor in held.items()
        for piece in tensor.pieces
    ]


def train(rank: int, world_size: int, layout: Layout, folder, lora: LoRA, head: str, adapters, target):
    """Update once on a frozen batch: (gradient norm, gradients, adapters afterwards); exports both ways to `target`."""
    from megarlhf.engines.learner import Learner, Objective, Part
    from megarlhf.models.lora import base_parameters
    from megarlhf.weights.adapters import export_peft
    from megarlhf.weights.export import export_model

    model = load_adapted(world_size, layout, folder, lora, head, adapters)
    frozen = {key: p.clone() for key, p in base_parameters(model).items() if not p.requires_grad}
    learner = Learner(model, SMOOTH, total_updates=10, max_tokens=64)
    parts = [Part(frozen_batch(num_rows=8), Objective(squared_error))]
    learner.accumulate(parts, complete_gradients=True)
    gradients = pieces(model, lora, lambda parameter: parameter.main_grad)
    result = learner.update(parts)
    assert result.applied
    for key, before in frozen.items():
        parameter = base_parameters(model)[key]
        assert torch.equal(parameter, before), f"{key} moved"
        assert parameter.grad is None and not hasattr(parameter, "main_grad"), f"{key} has a gradient"
    export_peft(model, target / "peft", lora, base=str(folder))
    export_model(model, target / "merged", source_folder=folder)
    assert torch.equal(base_parameters(model)[next(iter(frozen))], frozen[next(iter(frozen))])
    return result.gradient_norm, gradients, pieces(model, lora, lambda parameter: parameter)


def random_adapters(world_size_one: int, folder, lora: LoRA, head: str, target):
    """Write adapters whose B is not zero."""
    from megarlhf.models.lora import adapters
    from megarlhf.weights.adapters import export_peft

    model = load_adapted(world_size_one, Layout(), folder, lora, head)
    generator = torch.Generator().manual_seed(2)
    for adapter in adapters(model).values():
        adapter.b.data.copy_(0.05 * torch.randn(adapter.b.shape, generator=generator))
    export_peft(model, target, lora, base=str(folder))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, single_rank):
    """(folder, adapters, where one rank exported, its update), by model."""
    top, found = tmp_path_factory.mktemp("lora"), {}
    for name, (head, lora) in MODELS.items():
        folder = write_llama(top / name, tied=name == "tied", num_labels=int(head == "value"))
        random_adapters(1, folder, lora, head, top / f"{name}_adapters")
        update = train(0, 1, Layout(), folder, lora, head, top / f"{name}_adapters", top / f"{name}_one")
        found[name] = (folder, top / f"{name}_adapters", top / f"{name}_one", update)
    return found


@pytest.mark.parametrize("name,case", CASES)
def test_one_update_of_the_adapters_does_not_depend_on_the_layout(name, case, one_rank, tmp_path):
    folder, adapters, exported, (norm, gradients, after) = one_rank[name]
    (world_size, layout), (head, lora) = LAYOUTS[case], MODELS[name]
    ranks = run_on_ranks(world_size, train, layout, folder, lora, head, adapters, tmp_path)
    assert all(rank[0] == pytest.approx(norm, rel=1e-5) for rank in ranks)
    expected, found = assemble([gradients]), assemble([rank[1] for rank in ranks])
    assert expected.keys() == found.keys()
    difference = sum(float((expected[key] - found[key]).square().sum()) for key in expected) ** 0.5
    assert difference <= 1e-5 * norm
    expected, found = assemble([after]), assemble([rank[2] for rank in ranks])
    for key, tensor in expected.items():
        assert (tensor - found[key]).norm() <= 1e-5 * tensor.norm(), key
    assert files_differ_by(exported / "peft" / "adapter_model.safetensors", tmp_path / "peft") <= 1e-5
    assert files_differ_by(exported / "merged" / "model.safetensors", tmp_path / "merged") <= 1e-5


def files_differ_by(file, folder) -> float:
    """The largest difference of a tensor between two safetensors files, relative to its norm."""
    ours, theirs = load_file(file), load_file(folder / file.name)
    assert ours.keys() == theirs.keys()
    return max(float((ours[key] - theirs[key]).norm() / ours[key].norm()) for key in ours)


@pytest.mark.parametrize("name", MODELS)
def test_an_update_changes_every_adapter_and_merged_weights_of_its_targets_only(name, one_rank):
    folder, adapters, exported, (norm, _, after) = one_rank[name]
    before, found = load_file(adapters / "adapter_model.safetensors"), assemble([after])
    assert norm > 0 and before.keys() == found.keys()
    assert all(not torch.equal(before[key], found[key]) for key in before)
    files = [load_file(path / "model.safetensors") for path in (folder, exported / "merged")]
    lora = MODELS[name][1]
    same = {key for key in files[0] if torch.equal(files[0][key], files[1][key])}
    moved = {key.split(".")[-2] for key in files[0].keys() - same}
    assert moved == {*lora.targets} | ({"score"} if name == "value" else set())


def test_the_optimizer_keeps_state_for_the_adapters_only(tmp_path, single_rank):
    from megarlhf.engines.learner import Learner
    from megarlhf.weights.adapters import trained_parameters

    model = load_adapted(1, Layout(), write_llama(tmp_path / "base"), SOME, "vocabulary")
    learner = Learner(model, SMOOTH, total_updates=10, max_tokens=64)
    groups = [group for part in learner._optimizer.chained_optimizers for group in part.param_groups]
    covered = sum(parameter.numel() for group in groups for parameter in group["params"])
    assert covered == sum(parameter.numel() for parameter in trained_parameters(model).values())


def test_the_reference_is_the_model_with_its_adapters_off(one_rank, single_rank):
    from megarlhf.engines.scorer import LogprobScorer
    from megarlhf.models.lora import adapters_off

    folder, adapters, _, _ = one_rank["untied"]
    batch = frozen_batch(num_rows=8)
    model = load_adapted(1, Layout(), folder, SOME, "vocabulary", adapters)
    fresh = load_adapted(1, Layout(), folder, SOME, "vocabulary")
    score = [LogprobScorer(one, "logp_reference", 1.0, 64).annotate(batch).logp_reference for one in (model, fresh)]
    assert not torch.allclose(*score)
    with adapters_off(model):
        off = LogprobScorer(model, "logp_reference", 1.0, 64).annotate(batch).logp_reference
    assert torch.equal(off, score[1]), "fresh adapters add nothing"


def reshard(rank: int, world_size: int, source: Layout, target: Layout, folder, lora: LoRA, adapters):
    """Carry merged weights over; raises where a checksum of the two differs."""
    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.parallel.groups import build_groups
    from megarlhf.weights.checksum import weight_checksums
    from megarlhf.weights.exchange import Resharder

    trained = load_adapted(world_size, source, folder, lora, "vocabulary", adapters)
    architecture, groups = Architecture.from_folder(folder), build_groups(target, world_size)
    generator = build_model(architecture, groups, head="vocabulary", dtype=torch.float32, seed=None)
    Resharder(trained, generator, bucket_bytes=2048).run(is_checked=True)
    return weight_checksums(generator, torch.float32, groups.world)


@pytest.mark.parametrize(
    "source,target", [(Layout(tp=2, sp=True), Layout(pp=2)), (Layout(pp=2), Layout(tp=2)), (Layout(), Layout(tp=2))]
)
def test_merged_weights_reach_a_generator_of_another_layout(source, target, one_rank):
    folder, adapters, _, _ = one_rank["tied"]
    sums = run_on_ranks(2, reshard, source, target, folder, ALL, adapters)
    fresh = run_on_ranks(2, reshard, source, target, folder, ALL, None)
    assert sums[0] == sums[1] and sums[0].keys() == fresh[0].keys()
    linears = {name for name in sums[0] if name.endswith("_proj.weight")}
    assert {name for name in sums[0] if sums[0][name] != fresh[0][name]} == linears


def test_bfloat16_adapters_learn_through_float32_masters(one_rank, single_rank):
    """Steps far below bfloat16's resolution add up, which they would not in bfloat16 itself."""
    from megarlhf.engines.learner import Learner, Objective, Part
    from megarlhf.weights.adapters import trained_parameters

    folder, adapters, _, _ = one_rank["untied"]
    model = load_adapted(1, Layout(), folder, SOME, "vocabulary", adapters, dtype=torch.bfloat16)
    before = {key: parameter.clone() for key, parameter in trained_parameters(model).items()}
    tiny_steps = Optimizer(learning_rate=1e-5, clip_grad=0.0)
    learner = Learner(model, tiny_steps, total_updates=100, max_tokens=64)
    for _ in range(50):
        learner.update([Part(frozen_batch(num_rows=8), Objective(squared_error))])
    moved = {key: (parameter - before[key]).abs() for key, parameter in trained_parameters(model).items()}
    assert all(parameter.dtype == torch.bfloat16 for parameter in trained_parameters(model).values())
    for key, difference in moved.items():
        large = before[key].abs() > 0.02  # where a step is less than half of what bfloat16 resolves, 6e-5
        assert difference[large].max() > 0, key
        assert difference.float().mean() < 1e-3, key
