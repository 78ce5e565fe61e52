"""Every family beyond Llama: the same bytes after a round trip under every layout, which transformers reads."""

import pytest
import torch
from safetensors.torch import load_file

from megarlhf.config.layout import Layout
from megarlhf.models.architecture import Architecture
from megarlhf.models.build import build_model
from megarlhf.models.model_types import MODEL_TYPES
from megarlhf.parallel.groups import build_groups
from megarlhf.weights.exchange import Resharder
from megarlhf.weights.export import export_model
from megarlhf.weights.load import load_weights
from tests import tiny
from tests.distributed.pool import run_on_ranks
from tests.families import FAMILIES, VARIANTS, require_classifier

LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=4), Layout(pp=2), Layout(tp=2, pp=2)]
KINDS = VARIANTS | {f"{family} value": {"family": family, "num_labels": 1} for family in FAMILIES}


def model_of(folder, layout, world_size, kind):
    architecture, groups = Architecture.from_folder(folder), build_groups(layout, world_size)
    head = "value" if "value" in kind else "vocabulary"
    return build_model(architecture, groups, head=head, dtype=torch.float32, seed=None)


def round_trips_on_rank(rank, world_size, folders, top):
    for kind, folder in folders.items():
        models = [model_of(folder, layout, world_size, kind) for layout in LAYOUTS]
        for model, layout in zip(models, LAYOUTS, strict=True):
            load_weights(model, folder)
            export_model(model, top / f"{kind}_{layout}", source_folder=folder)
        resharded = model_of(folder, Layout(pp=2), world_size, kind)
        Resharder(models[2], resharded).run()
        export_model(resharded, top / f"{kind}_resharded", source_folder=folder)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(folders of the originals by kind, folder with all exports), made on four ranks."""
    top = tmp_path_factory.mktemp("exports")
    folders = {kind: tiny.write_llama(top / f"from_{kind}", seed=3, **KINDS[kind]) for kind in KINDS}
    run_on_ranks(4, round_trips_on_rank, folders, top)
    return folders, top


@pytest.mark.parametrize("kind", KINDS)
def test_export_gives_back_every_tensor_bit_for_bit(exported, kind):
    folders, top = exported
    expected = load_file(folders[kind] / "model.safetensors")
    for layout in [*LAYOUTS, "resharded"]:
        found = load_file(top / f"{kind}_{layout}" / "model.safetensors")
        assert found.keys() == expected.keys(), layout
        assert all(torch.equal(found[name], expected[name]) for name in expected), layout


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_the_export_and_agrees_with_the_original(exported, kind):
    import transformers

    folders, top = exported
    if "value" in kind:
        require_classifier(KINDS[kind]["family"])
    is_value, model_type = "value" in kind, MODEL_TYPES[KINDS[kind]["family"]]
    prefix = is_value and model_type.classifier_prefix or model_type.class_prefix
    auto = transformers.AutoModelForSequenceClassification if is_value else transformers.AutoModelForCausalLM
    models = []
    for path in (folders[kind], top / f"{kind}_{Layout(tp=2, pp=2)}"):
        model, report = auto.from_pretrained(path, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert model.config.architectures == [type(model).__name__]
        assert type(model).__name__ == prefix + ("ForSequenceClassification" if is_value else "ForCausalLM")
        models.append(model.eval())
    ids = torch.arange(2, 40)[None]
    assert torch.equal(*(model(ids).logits for model in models))


@pytest.mark.parametrize("kind", KINDS)
def test_the_exports_config_means_the_same(exported, kind):
    folders, top = exported
    assert Architecture.from_folder(top / f"{kind}_{Layout()}") == Architecture.from_folder(folders[kind])
