"""FP8 weights with scales a block are read as value times scale, in any box; without their scales they are not read."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarlhf.config.layout import Layout
from megarlhf.errors import CheckpointError
from megarlhf.models.architecture import Architecture
from megarlhf.parallel.groups import build_groups
from megarlhf.weights.convert import write_hugging_face, write_megatron
from megarlhf.weights.folder import SafetensorsFolder
from tests import tiny
from tests.models.helpers import load

SIZES = {"hidden_size": 160, "intermediate_size": 264, "num_hidden_layers": 2, "head_dim": 36}
QUANTISED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def quantise(weight):
    """(float8_e4m3fn values, float32 scales), block by block."""
    rows, columns = weight.shape
    values, scales = torch.empty(weight.shape), torch.empty(-(-rows // 128), -(-columns // 128))
    for row in range(0, rows, 128):
        for column in range(0, columns, 128):
            block = weight[row : row + 128, column : column + 128]
            scale = block.abs().max() / 448
            values[row : row + 128, column : column + 128] = block / scale
            scales[row // 128, column // 128] = scale
    return values.to(torch.float8_e4m3fn), scales


def expand(values, scales):
    """The weight, element by element."""
    rows, columns = values.shape
    factors = [[float(scales[row // 128, column // 128]) for column in range(columns)] for row in range(rows)]
    return (values.float() * torch.tensor(factors)).to(torch.bfloat16)


@pytest.fixture(scope="module", params=["llama", "phi3"])
def folders(request, tmp_path_factory):
    """(a folder with FP8 linears, the same weights in bfloat16)."""
    top = tmp_path_factory.mktemp("fp8")
    plain, fp8 = (tiny.write_llama(top / name, family=request.param, dtype=torch.bfloat16, **SIZES) for name in "ab")
    weights, stored = load_file(plain / "model.safetensors"), {}
    for name, weight in list(weights.items()):
        stored[name] = weight
        if name.endswith("_proj.weight"):
            stored[name], stored[name + "_scale_inv"] = quantise(weight.float())
            weights[name] = expand(stored[name], stored[name + "_scale_inv"])
    save_file(weights, plain / "model.safetensors")
    save_file(stored, fp8 / "model.safetensors")
    config = json.loads((fp8 / "config.json").read_text())
    (fp8 / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTISED}))
    return fp8, plain


def test_any_box_is_value_times_scale(folders):
    found, expected = (SafetensorsFolder(folder) for folder in folders)
    assert found.names == expected.names
    draw = random.Random(0)
    for name in found.names:
        shape = found.shape(name)
        assert found.dtype(name) == torch.bfloat16 and shape == expected.shape(name)
        for _ in range(8):
            edges = [sorted(draw.sample(range(size + 1), 2)) for size in shape]
            box = tuple((start, stop) for start, stop in edges)
            assert torch.equal(found.read(name, box), expected.read(name, box)), (name, box)


def test_bands_of_rows_join_without_a_seam(folders, monkeypatch):
    monkeypatch.setattr("megarlhf.weights.block_scales._BAND_BLOCKS", 1)
    test_any_box_is_value_times_scale(folders)


def test_a_model_loads_the_same_weights(folders, single_rank):
    alone = build_groups(Layout(), 1)
    found, expected = (load(folder, alone, dtype=torch.bfloat16).named_parameters() for folder in folders)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_converters_write_bfloat16_weights_and_a_plain_config(folders, tmp_path):
    fp8, plain = folders
    write_megatron(fp8, tmp_path / "megatron", Layout(tp=2, pp=2))
    write_hugging_face(tmp_path / "megatron", tmp_path / "back")
    write_hugging_face(fp8, tmp_path / "direct")
    expected = load_file(plain / "model.safetensors")
    for name in ("back", "direct"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert "quantization_config" not in json.loads((tmp_path / name / "config.json").read_text())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda weights, name: weights.pop(name + "_scale_inv"),
            r"_proj.weight is FP8 but .*_scale_inv \[2, 2\] is missing",
        ),
        (
            lambda weights, name: weights.update({name + "_scale_inv": torch.ones(2, 1)}),
            r"_scale_inv is \[2, 1\] F32; expected \[2, 2\]",
        ),
        (lambda weights, name: weights.update({name: weights[name].to(torch.float8_e5m2)}), "dtype F8_E5M2; accepted"),
        (lambda weights, name: weights.update({name: weights[name].to(torch.bfloat16)}), "_scale_inv .* is no part of"),
    ],
)
def test_scales_that_do_not_fit_are_told_by_name(folders, change, words, tmp_path):
    folder, name = folders[0], "model.layers.1.self_attn.o_proj.weight"
    weights = load_file(folder / "model.safetensors")
    change(weights, name)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=words):
        write_hugging_face(tmp_path, tmp_path / "target")


@pytest.mark.parametrize(
    ("quantised", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq' is not supported; supported: 'fp8'"),
        ({"quant_method": "fp8"}, "weight_block_size None"),
        (QUANTISED | {"weight_block_size": [64, 128]}, r"weight_block_size \[64, 128\]"),
        (QUANTISED | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (3, "field quantization_config is 3; expected an object"),
    ],
)
def test_other_quantisations_are_refused_by_name(quantised, words):
    with pytest.raises(CheckpointError, match=words):
        Architecture.from_hf(tiny.tiny_config(quantization_config=quantised))
