"""Loading is strict both ways: what does not fit is named, before any weight has changed."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarlhf.config.layout import Layout
from megarlhf.errors import CheckpointError
from megarlhf.models.architecture import Architecture
from megarlhf.models.build import build_model
from megarlhf.parallel.groups import build_groups
from megarlhf.weights.load import load_weights
from tests import tiny
from tests.distributed.pool import run_on_ranks


@pytest.fixture(scope="session")
def groups(single_rank):
    return build_groups(Layout(), 1)


def empty_model(folder, groups, head="vocabulary", dtype=torch.float32):
    return build_model(Architecture.from_folder(folder), groups, head=head, dtype=dtype, seed=None)


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def assert_untouched(model):
    assert all((parameter == 0).all() or "norm" in name for (_, name), parameter in model.named_parameters().items())


@pytest.mark.parametrize("tied", [False, True])
def test_a_loaded_model_holds_the_files_values(tmp_path, groups, tied):
    folder = tiny.write_llama(tmp_path, tied=tied)
    model = empty_model(folder, groups)
    report = load_weights(model, folder)
    file, held = load_file(folder / "model.safetensors"), model.named_parameters()
    assert report.num_tensors == len(file)
    assert report.bytes_read == sum(tensor.numel() * 4 for tensor in file.values())
    assert report.ignored == () and not report.is_value_head_new
    assert torch.equal(held[0, "embedding.word_embeddings.weight"], file["model.embed_tokens.weight"])
    assert torch.equal(held[0, "decoder.layers.3.mlp.linear_fc2.weight"], file["model.layers.3.mlp.down_proj.weight"])


def test_missing_and_unexpected_tensors_are_both_listed_and_nothing_changes(tmp_path, groups):
    folder = tiny.write_llama(tmp_path)

    def change(weights):
        weights["model.layers.2.mlp.extra.weight"] = weights.pop("model.layers.2.mlp.up_proj.weight")

    change_weights(folder, change)
    model = empty_model(folder, groups)
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, folder)
    assert "model.layers.2.mlp.up_proj.weight [56, 32] is missing" in str(caught.value)
    assert "holds model.layers.2.mlp.extra.weight [56, 32]" in str(caught.value)
    assert_untouched(model)


def test_a_wrong_shape_is_told_with_both_shapes_and_nothing_changes(tmp_path, groups):
    folder = tiny.write_llama(tmp_path)
    small = json.loads((folder / "config.json").read_text()) | {"vocab_size": 90}
    (folder / "config.json").write_text(json.dumps(small))
    model = empty_model(folder, groups)
    with pytest.raises(
        CheckpointError, match=r"embed_tokens.weight has shape \[101, 32\], config.json says \[90, 32\]"
    ):
        load_weights(model, folder)
    assert_untouched(model)


def test_rotary_buffers_are_ignored(tmp_path, groups):
    folder = tiny.write_llama(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_weights(folder, lambda weights: weights.update({name: torch.ones(6)}))
    assert load_weights(empty_model(folder, groups), folder).ignored == (name,)


def test_a_second_copy_of_tied_embeddings_must_be_a_copy(tmp_path, groups):
    folder = tiny.write_llama(tmp_path, tied=True)
    embedding = "model.embed_tokens.weight"
    change_weights(folder, lambda weights: weights.update({"lm_head.weight": weights[embedding].clone()}))
    assert load_weights(empty_model(folder, groups), folder).ignored == ("lm_head.weight",)
    change_weights(folder, lambda weights: weights["lm_head.weight"].add_(1))
    with pytest.raises(
        CheckpointError, match="lm_head.weight differs from model.embed_tokens.weight.*tie_word_embeddings"
    ):
        load_weights(empty_model(folder, groups), folder)


def test_a_language_model_is_no_reward_model_unless_a_new_value_head_is_asked_for(tmp_path, groups):
    folder = tiny.write_llama(tmp_path)
    model = empty_model(folder, groups, head="value")
    with pytest.raises(CheckpointError, match="no score.weight, so this is not a reward or value model"):
        load_weights(model, folder)
    assert_untouched(model)
    report = load_weights(model, folder, new_value_head=True)
    assert report.is_value_head_new and report.ignored == ("lm_head.weight",)
    assert (model.named_parameters()[0, "value_head.weight"] == 0).all()


def test_a_reward_models_head_is_kept_unless_a_new_one_is_asked_for(tmp_path, groups):
    folder = tiny.write_llama(tmp_path, num_labels=1)
    model = empty_model(folder, groups, head="value")
    report = load_weights(model, folder)
    assert report.head == "score" and not report.is_value_head_new
    score = load_file(folder / "model.safetensors")["score.weight"]
    assert torch.equal(model.named_parameters()[0, "value_head.weight"], score)
    report = load_weights(model, folder, new_value_head=True)
    assert report.is_value_head_new and report.ignored == ("score.weight",)
    assert (model.named_parameters()[0, "value_head.weight"] == 0).all()


def test_a_reward_model_is_no_language_model(tmp_path, groups):
    folder = tiny.write_llama(tmp_path, num_labels=1)
    with pytest.raises(CheckpointError, match="lm_head.weight .* is missing"):
        load_weights(empty_model(folder, groups), folder)


def test_files_in_bfloat16_fill_a_float32_model_exactly(tmp_path, groups):
    folder = tiny.write_llama(tmp_path, dtype=torch.bfloat16)
    model = empty_model(folder, groups)
    load_weights(model, folder)
    file = load_file(folder / "model.safetensors")
    assert torch.equal(model.named_parameters()[0, "output_layer.weight"], file["lm_head.weight"].float())


def fail_on_rank(rank, world_size, folders):
    model = empty_model(folders[rank], build_groups(Layout(pp=2), world_size))
    try:
        load_weights(model, folders[rank])
    except CheckpointError as error:
        return str(error)


def test_a_problem_that_one_rank_has_stops_them_all(tmp_path):
    folders = [tiny.write_llama(tmp_path / name) for name in ("whole", "broken")]
    change_weights(folders[1], lambda weights: weights.pop("model.norm.weight"))
    messages = run_on_ranks(2, fail_on_rank, folders)
    assert messages[0] == messages[1] and "model.norm.weight [32] is missing" in messages[0]
