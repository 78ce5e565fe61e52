"""Folders that are whole are read by slices; every way to be broken has a message naming file and tensor."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarlhf.errors import CheckpointError
from megarlhf.weights.folder import SafetensorsFolder
from tests import tiny

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path):
    return tiny.write_llama(tmp_path / "sharded", num_shards=3)


def rewrite_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_boxes_are_read_from_the_right_file(tmp_path, num_shards):
    folder = SafetensorsFolder(tiny.write_llama(tmp_path, num_shards=num_shards))
    weights = tiny.tiny_weights(tiny.tiny_config())
    assert folder.names == tuple(sorted(weights))
    for name, weight in weights.items():
        box = tuple((size // 3, size // 2 + 1) for size in weight.shape)
        assert torch.equal(folder.read(name, box), weight[tuple(slice(*interval) for interval in box)])
        assert folder.shape(name) == weight.shape and folder.dtype(name) == torch.float32


def test_a_missing_shard_is_named_with_what_was_in_it(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lists model-00002-of-00003.safetensors, which is not there.*download"):
        SafetensorsFolder(sharded)


def test_a_tensor_that_the_index_does_not_list_is_named(sharded):
    rewrite_index(sharded, lambda listed: listed.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match="holds model.norm.weight, not listed for it"):
        SafetensorsFolder(sharded)


def test_a_listed_tensor_that_no_file_holds_is_named(sharded):
    rewrite_index(sharded, lambda listed: listed.update({"model.extra.weight": "model-00001-of-00003.safetensors"}))
    with pytest.raises(
        CheckpointError, match="lists model.extra.weight in model-00001-of-00003.safetensors, which lacks"
    ):
        SafetensorsFolder(sharded)


def test_pickled_weights_are_refused_with_the_way_to_convert_them(tmp_path):
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only pickled weights \(pytorch_model.bin\).*save_pretrained"):
        SafetensorsFolder(tmp_path)


def test_safetensors_under_another_name_are_not_guessed(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match="has weights.safetensors but neither model.safetensors nor"):
        SafetensorsFolder(tmp_path)


def test_an_empty_or_absent_folder_is_said_to_be_so(tmp_path):
    with pytest.raises(CheckpointError, match="no model.safetensors and no model.safetensors.index.json"):
        SafetensorsFolder(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        SafetensorsFolder(tmp_path / "nowhere")


def test_a_file_cut_short_is_named(sharded):
    file = sharded / "model-00003-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="model-00003-of-00003.safetensors: not a readable safetensors file"):
        SafetensorsFolder(sharded)


def test_a_broken_index_is_named(sharded):
    (sharded / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="not an index of safetensors"):
        SafetensorsFolder(sharded)
    (sharded / INDEX).write_text('{"weight_map": ["model-00001-of-00003.safetensors"]}')
    with pytest.raises(CheckpointError, match="weight_map lists no files"):
        SafetensorsFolder(sharded)


def test_a_dtype_that_weights_cannot_have_is_named(tmp_path):
    save_file({"a": torch.ones(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="a has dtype I8; accepted: F32, BF16, F16"):
        SafetensorsFolder(tmp_path).dtype("a")


def test_reading_a_box_twice_gives_the_same_bytes(sharded):
    folder = SafetensorsFolder(sharded)
    file = load_file(sharded / folder.file_of("model.norm.weight"))
    assert torch.equal(folder.read("model.norm.weight", ((0, 32),)), file["model.norm.weight"])
