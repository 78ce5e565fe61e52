"""Adapters leave the house merged into Hugging Face weights, or as PEFT's own files, and come back bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file

from megarlhf.config.layout import Layout
from megarlhf.engines.generator import Generator, Request, Sampling
from megarlhf.errors import CheckpointError
from megarlhf.models.architecture import Architecture
from megarlhf.models.families import FAMILIES
from megarlhf.models.forward import packed_forward
from megarlhf.models.lora import add_lora, base_parameters, merged_parameters
from megarlhf.models.names import Cut, row_sources, stage_weights
from megarlhf.parallel.grid import Grid
from megarlhf.parallel.groups import build_groups
from megarlhf.weights.adapters import adapter_map, adapter_shapes, export_peft, load_peft, trained_parameters
from megarlhf.weights.boxes import num_elements, whole
from megarlhf.weights.exchange import Resharder
from megarlhf.weights.export import export_model
from megarlhf.weights.load import load_weights
from megarlhf.weights.local_map import local_map
from tests import tiny
from tests.models.helpers import load, random_rows, reference_logits, stream
from tests.models.test_lora import LORA, SOME, adapted_model, logits

LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=4), Layout(pp=2), Layout(tp=2, pp=2)]


@pytest.fixture(scope="module")
def groups(single_rank):
    return build_groups(Layout(), 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_llama(tmp_path_factory.mktemp("lora") / "base", seed=3)


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory):
    return tiny.write_llama(tmp_path_factory.mktemp("lora") / "reward", seed=4, num_labels=1)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_row_belongs_to_the_projection_that_the_weight_map_says(tp, folder):
    architecture, family = Architecture.from_folder(folder), FAMILIES["llama"]
    linears = [weight for weight in family.layer if weight.cut is not Cut.WHOLE]
    assert len(linears) == 4
    for at in map(Grid(Layout(tp=tp), tp).coordinates, range(tp)):
        held = local_map(architecture, Layout(tp=tp), at, "vocabulary")
        for weight in stage_weights(family, architecture, Layout(tp=tp), 0, 0, "vocabulary"):
            if weight.cut in {linear.cut for linear in linears}:
                rows = [None] * held[0, weight.local].shape[0]
                for piece in held[0, weight.local].pieces:
                    start, stop = piece.target[0]
                    rows[start:stop] = [piece.hf_name] * (stop - start)
                sources = row_sources(weight, architecture, tp, at.tp)
                assert [weight.hf[place] for place in sources] == rows


@pytest.mark.parametrize("lora", [LORA, SOME], ids=["all linears", "some"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_ranks_together_hold_every_element_of_the_adapters(layout, lora, folder):
    architecture, size = Architecture.from_folder(folder), layout.tp * layout.pp
    grid, boxes = Grid(layout, size), {}
    for rank in range(size):
        for tensor in adapter_map(architecture, layout, grid.coordinates(rank), "vocabulary", lora).values():
            for piece in tensor.pieces:
                boxes.setdefault(piece.hf_name, set()).add(piece.source)
    shapes = adapter_shapes(architecture, "vocabulary", lora)
    assert boxes.keys() == shapes.keys() and len(shapes) == 2 * tiny.LAYERS * len(lora.targets)
    for name, shape in shapes.items():
        assert sum(map(num_elements, boxes[name])) == num_elements(whole(shape)), name


def test_the_map_names_the_trained_parameters_in_their_shapes(folder, reward_folder, groups):
    for source, head in ((folder, "vocabulary"), (reward_folder, "value")):
        model = adapted_model(source, groups, SOME, head)
        held = adapter_map(model.architecture, Layout(), groups.coordinates, head, SOME)
        assert {key: tensor.shape for key, tensor in held.items()} == {
            key: tuple(parameter.shape) for key, parameter in trained_parameters(model).items()
        }


@pytest.mark.parametrize("lora", [LORA, SOME], ids=["all linears", "some"])
def test_transformers_computes_the_merged_export_alike(lora, folder, groups, tmp_path):
    model = adapted_model(folder, groups, lora)
    export_model(model, tmp_path / "merged", source_folder=folder)
    assert torch.allclose(reference_logits(tmp_path / "merged", random_rows()), logits(model), atol=1e-4, rtol=0)
    original, found = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "merged"))
    changed = {name.split(".")[-2] for name in original if not torch.equal(original[name], found[name])}
    assert changed == set(lora.targets)
    assert all(
        torch.equal(tensor, load(folder, groups).named_parameters()[key])
        for key, tensor in base_parameters(model).items()
    ), "the base is untouched"


def test_other_tensors_can_be_exported_in_place_of_the_weights(folder, groups, tmp_path):
    model = load(folder, groups)
    doubled = {key: 2 * parameter.detach() for key, parameter in model.named_parameters().items()}
    export_model(model, tmp_path / "doubled", source_folder=folder, tensors=doubled)
    original, found = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "doubled"))
    assert all(torch.equal(found[name], 2 * original[name]) for name in original)


def test_the_generator_receives_merged_weights(folder, groups):
    model, generator = adapted_model(folder, groups), load(folder, groups)
    Resharder(model, generator).run(is_checked=True)
    merged = merged_parameters(model)
    assert all(torch.equal(parameter, merged[key]) for key, parameter in generator.named_parameters().items())
    assert torch.allclose(logits(generator), logits(model), atol=1e-5, rtol=1e-5)
    doubled = {key: 2 * parameter.detach() for key, parameter in base_parameters(model).items()}
    Resharder(model, generator).run(tensors=doubled, is_checked=True)
    assert all(torch.equal(parameter, doubled[key]) for key, parameter in generator.named_parameters().items())


def test_an_adapted_model_samples_what_its_merged_weights_sample(folder, groups):
    model, merged = adapted_model(folder, groups), load(folder, groups)
    Resharder(model, merged).run()
    requests = [Request(tuple(row.tolist()), place) for place, row in enumerate(random_rows())]
    sampling = Sampling(temperature=0, max_new_tokens=10)
    ours, theirs = (Generator(one, 4).generate(requests, sampling) for one in (model, merged))
    assert [found.token_ids for found in ours] == [found.token_ids for found in theirs]
    base = Generator(load(folder, groups), 4).generate(requests, sampling)
    assert [found.token_ids for found in ours] != [found.token_ids for found in base]


def test_an_adapted_model_loads_its_base_again_without_touching_the_adapters(folder, groups):
    model = adapted_model(folder, groups)
    before, expected = {key: p.clone() for key, p in trained_parameters(model).items()}, logits(model)
    load_weights(model, folder)
    assert all(torch.equal(parameter, before[key]) for key, parameter in trained_parameters(model).items())
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("lora", [LORA, SOME], ids=["all linears", "some"])
def test_peft_loads_the_adapters_and_agrees(lora, folder, groups, tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    model = adapted_model(folder, groups, lora)
    export_peft(model, tmp_path / "adapters", lora, base=str(folder))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    with torch.no_grad():
        expected = torch.cat([theirs(row[None]).logits[0] for row in random_rows()])
    assert torch.allclose(logits(model), expected, atol=1e-4, rtol=0)
    theirs.save_pretrained(tmp_path / "again")
    ours, back = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapters", "again"))
    assert ours.keys() == back.keys() and all(torch.equal(ours[name], back[name]) for name in ours)


def test_peft_loads_a_reward_model_with_its_head(reward_folder, groups, tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    model = adapted_model(reward_folder, groups, SOME, "value")
    with torch.no_grad():
        model.chunks[0].value_head.weight.mul_(3)
        row = random_rows()[0]
        found = model.chunks[0].value_head(packed_forward(model.chunks[0], stream([row]))[-1:, 0])
    export_peft(model, tmp_path / "adapters", SOME, base=str(reward_folder))
    base = transformers.AutoModelForSequenceClassification.from_pretrained(reward_folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    with torch.no_grad():
        assert torch.allclose(found, theirs(row[None]).logits[0], atol=1e-4, rtol=0)


def test_adapters_come_back_bit_for_bit(reward_folder, groups, tmp_path):
    model = adapted_model(reward_folder, groups, SOME, "value")
    export_peft(model, tmp_path / "adapters", SOME, base="somewhere/base")
    other = load(reward_folder, groups, "value")
    add_lora(other, SOME, seed=9)
    load_peft(other, tmp_path / "adapters", SOME)
    found = trained_parameters(other)
    assert all(torch.equal(parameter, found[key]) for key, parameter in trained_parameters(model).items())


def test_adapters_of_another_make_are_refused(folder, reward_folder, groups, tmp_path):
    export_peft(adapted_model(folder, groups, SOME), tmp_path / "adapters", SOME, base=str(folder))
    model = adapted_model(folder, groups)
    with pytest.raises(CheckpointError, match=r"r is 2, lora.rank is 3") as caught:
        load_peft(model, tmp_path / "adapters", LORA)
    assert "targets" in str(caught.value) and "alpha" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"adapter_config.json: cannot be read"):
        load_peft(model, folder, LORA)
    with pytest.raises(CheckpointError, match=r"1 tensors are not this model's, for example base_model.model.score"):
        load_peft(adapted_model(reward_folder, groups, SOME, "value"), tmp_path / "adapters", SOME)


def test_a_folder_of_adapters_is_not_overwritten_unless_asked(folder, groups, tmp_path):
    model = adapted_model(folder, groups, SOME)
    export_peft(model, tmp_path / "adapters", SOME, base="one")
    with pytest.raises(CheckpointError, match="is there already"):
        export_peft(model, tmp_path / "adapters", SOME, base="two")
    export_peft(model, tmp_path / "adapters", SOME, base="two", replace=True)
    assert json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())["base_model_name_or_path"] == "two"
    assert not [file.name for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_bfloat16_adapters_are_written_in_bfloat16(tmp_path, groups):
    folder = tiny.write_llama(tmp_path / "base", dtype=torch.bfloat16)
    model = load(folder, groups, dtype=torch.bfloat16)
    add_lora(model, SOME)
    export_peft(model, tmp_path / "adapters", SOME, base=str(folder))
    found = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
