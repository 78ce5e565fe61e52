"""Hugging Face -> megatron-core -> Hugging Face is the same bytes under every layout; transformers reads the result."""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarlhf.config.layout import Layout
from megarlhf.errors import CheckpointError
from megarlhf.models.architecture import Architecture
from megarlhf.models.build import build_model
from megarlhf.parallel.groups import build_groups
from megarlhf.weights.export import export_model
from megarlhf.weights.load import load_weights
from tests import tiny
from tests.distributed.pool import run_on_ranks

LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=4), Layout(pp=2), Layout(pp=4), Layout(tp=2, pp=2)]
KINDS = {
    "untied": ({}, "vocabulary"),
    "tied": ({"tied": True, "llama3": True, "num_hidden_layers": 5}, "vocabulary"),
    "value": ({"num_labels": 1}, "value"),
}


def round_trip(folder, target, layout, world_size, head, dtype=torch.float32, **settings):
    model = build_model(
        Architecture.from_folder(folder), build_groups(layout, world_size), head=head, dtype=dtype, seed=None
    )
    load_weights(model, folder)
    export_model(model, target, source_folder=folder, **settings)


def round_trips_on_rank(rank, world_size, folders, target):
    for kind, folder in folders.items():
        for layout in LAYOUTS:
            round_trip(folder, target / f"{kind}_{layout}", layout, world_size, KINDS[kind][1], bucket_bytes=4096)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(folders of the originals by kind, folder with all exports by kind and layout), made on four ranks."""
    top = tmp_path_factory.mktemp("exports")
    folders = {kind: tiny.write_llama(top / f"from_{kind}", seed=3, **KINDS[kind][0]) for kind in KINDS}
    run_on_ranks(4, round_trips_on_rank, folders, top)
    return folders, top


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_export_gives_back_every_tensor_bit_for_bit(exported, kind, layout):
    folders, top = exported
    expected, found = (load_file(path / "model.safetensors") for path in (folders[kind], top / f"{kind}_{layout}"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) and found[name].dtype == torch.float32 for name in expected)


def test_padded_vocabulary_rows_are_not_exported(exported):
    _, top = exported
    found = load_file(top / f"untied_{Layout(tp=4)}" / "model.safetensors")
    assert found["model.embed_tokens.weight"].shape == found["lm_head.weight"].shape == (101, 32)
    assert json.loads((top / f"untied_{Layout(tp=4)}" / "config.json").read_text())["vocab_size"] == 101


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_files_are_copied_byte_for_byte_and_nothing_else_is_left(exported, kind):
    folders, top = exported
    original, copy = folders[kind], top / f"{kind}_{Layout(tp=2, pp=2)}"
    names = {file.name for file in original.iterdir()}
    assert {file.name for file in copy.iterdir()} == names
    for name in names - {"config.json", "model.safetensors"}:
        assert (copy / name).read_bytes() == (original / name).read_bytes()
    assert not [file.name for file in top.iterdir() if file.name.startswith(".")]


def test_the_config_says_rope_in_the_words_of_both_transformers(exported):
    folders, top = exported
    config = json.loads((top / f"tied_{Layout(pp=2)}" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5000.0
    assert config["rope_scaling"] == tiny.LLAMA3_ROPE
    assert Architecture.from_hf(config) == Architecture.from_folder(folders["tied"])
    plain = json.loads((top / f"untied_{Layout(pp=2)}" / "config.json").read_text())
    assert plain["rope_scaling"] is None and plain["rope_parameters"]["rope_type"] == "default"


def test_transformers_loads_the_export_and_agrees_with_the_original(exported):
    import transformers

    folders, top = exported
    ids = torch.arange(2, 40)[None]
    for kind in ("untied", "tied"):
        logits = []
        for path in (folders[kind], top / f"{kind}_{Layout(tp=2, pp=2)}"):
            model, report = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
            assert not report["missing_keys"] and not report["unexpected_keys"]
            logits.append(model(ids).logits)
        assert torch.equal(*logits)


def test_a_value_model_loads_as_a_classifier_with_one_label(exported):
    import transformers

    folders, top = exported
    path = top / f"value_{Layout(tp=2)}"
    judge, report = transformers.AutoModelForSequenceClassification.from_pretrained(path, output_loading_info=True)
    assert type(judge).__name__ == "LlamaForSequenceClassification"
    assert judge.config.num_labels == 1 and judge.config.pad_token_id == 1
    assert not report["missing_keys"] and not report["unexpected_keys"]
    original = transformers.AutoModelForSequenceClassification.from_pretrained(folders["value"])
    ids = torch.arange(2, 40)[None]
    assert torch.equal(judge(ids).logits, original(ids).logits)


@pytest.fixture(scope="session")
def groups(single_rank):
    return build_groups(Layout(), 1)


def test_several_files_have_a_right_index_and_load_again(tmp_path, groups):
    folder = tiny.write_llama(tmp_path / "from")
    round_trip(folder, tmp_path / "to", Layout(), 1, "vocabulary", max_shard_bytes=60_000)
    files = sorted(file.name for file in (tmp_path / "to").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "to" / "model.safetensors.index.json").read_text())
    union, original = {}, load_file(folder / "model.safetensors")
    for file in files:
        part = load_file(tmp_path / "to" / file)
        assert (tmp_path / "to" / file).stat().st_size < 70_000
        assert all(index["weight_map"][name] == file for name in part) and not union.keys() & part.keys()
        union |= part
    assert union.keys() == index["weight_map"].keys() == original.keys()
    assert all(torch.equal(union[name], original[name]) for name in original)
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in original.values())
    round_trip(tmp_path / "to", tmp_path / "again", Layout(), 1, "vocabulary")


def test_a_bfloat16_model_is_exported_in_bfloat16(tmp_path, groups):
    folder = tiny.write_llama(tmp_path / "from", dtype=torch.bfloat16, num_labels=1)
    round_trip(folder, tmp_path / "to", Layout(), 1, "value", dtype=torch.bfloat16)
    found, expected = (load_file(path / "model.safetensors") for path in (tmp_path / "to", folder))
    assert found.pop("score.weight").dtype == torch.float32
    assert all(found[name].dtype == torch.bfloat16 and torch.equal(found[name], expected[name]) for name in found)
    config = json.loads((tmp_path / "to" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"


def test_a_critic_made_from_a_language_model_exports_as_a_classifier(tmp_path, groups):
    folder = tiny.write_llama(tmp_path / "from", pad_token_id=None)
    model = build_model(Architecture.from_folder(folder), groups, head="value", dtype=torch.float32, seed=None)
    load_weights(model, folder, new_value_head=True)
    export_model(model, tmp_path / "to", source_folder=folder)
    config = json.loads((tmp_path / "to" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and config["num_labels"] == 1
    assert config["pad_token_id"] == config["eos_token_id"] == 0
    load_weights(model, tmp_path / "to")


def test_a_folder_that_is_there_is_kept_unless_it_may_be_replaced(tmp_path, groups):
    folder = tiny.write_llama(tmp_path / "from")
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is there already"):
        round_trip(folder, tmp_path / "to", Layout(), 1, "vocabulary")
    assert (tmp_path / "to" / "mine.txt").exists()
    round_trip(folder, tmp_path / "to", Layout(), 1, "vocabulary", replace=True)
    assert not (tmp_path / "to" / "mine.txt").exists() and (tmp_path / "to" / "model.safetensors").exists()


def fail_on_rank(rank, world_size, folder, target):
    try:
        round_trip(folder, target, Layout(pp=2), world_size, "vocabulary")
    except CheckpointError as error:
        dist.barrier()
        return str(error)


def test_a_place_that_cannot_be_written_stops_all_ranks(tmp_path):
    folder = tiny.write_llama(tmp_path / "from")
    (tmp_path / "file").write_text("")
    messages = run_on_ranks(2, fail_on_rank, folder, tmp_path / "file" / "to")
    assert messages[0] == messages[1] and "export failed" in messages[0]


def test_a_source_folder_without_config_is_found_before_anything_is_sent(tmp_path, groups):
    folder = tiny.write_llama(tmp_path / "from")
    model = build_model(Architecture.from_folder(folder), groups, head="vocabulary", dtype=torch.float32, seed=None)
    with pytest.raises(CheckpointError, match="no config.json to base the export's on"):
        export_model(model, tmp_path / "to", source_folder=tmp_path)
    assert not (tmp_path / "to").exists()
