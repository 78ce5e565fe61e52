"""Checkpoints written here are megatron-core's own, and its own are read here: every bit, whatever the layout."""

import os
import pickle
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarlhf.config.layout import Layout
from megarlhf.errors import CheckpointError
from megarlhf.models.architecture import Architecture
from megarlhf.models.build import build_model
from megarlhf.parallel.groups import build_groups
from megarlhf.weights.convert import write_hugging_face, write_megatron
from megarlhf.weights.load import load_weights
from megarlhf.weights.restricted_pickle import read_metadata
from megarlhf.weights.torch_dist import TorchDistFolder
from tests import tiny
from tests.distributed.pool import run_on_ranks
from tests.families import VARIANTS

KINDS = {"untied": {}, "tied": {"tied": True}, "value": {"num_labels": 1}}


def assert_same_files(one: Path, other: Path) -> None:
    left, right = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


ROUND_TRIPS = [Layout(), Layout(tp=2, pp=2), Layout(tp=4), Layout(pp=3), Layout(tp=2, pp=2, vp=2)]


@pytest.mark.parametrize("kind", KINDS | VARIANTS)
@pytest.mark.parametrize("layout", ROUND_TRIPS, ids=str)
def test_a_round_trip_keeps_every_bit(tmp_path, kind, layout):
    settings = (KINDS | VARIANTS)[kind]
    if layout.pp * layout.vp > settings.get("num_hidden_layers", tiny.LAYERS):
        layout = replace(layout, pp=1)
    source = tiny.write_llama(tmp_path / "hf", dtype=torch.bfloat16, **settings)
    write_megatron(source, tmp_path / "megatron", layout)
    write_hugging_face(tmp_path / "megatron", tmp_path / "back")
    assert_same_files(source, tmp_path / "back")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (source / file).read_bytes() == (tmp_path / "back" / file).read_bytes()
    assert Architecture.from_folder(source) == Architecture.from_folder(tmp_path / "back")


def test_a_file_holds_the_layers_of_its_virtual_stages(tmp_path):
    write_megatron(tiny.write_llama(tmp_path / "hf"), tmp_path / "megatron", Layout(pp=2, vp=2))
    blocks = TorchDistFolder(tmp_path / "megatron").blocks("decoder.layers.mlp.linear_fc2.weight")
    assert sorted((block.file, block.box[0][0]) for block in blocks) == [
        ("__0_0.distcp", 0), ("__0_0.distcp", 2), ("__1_0.distcp", 1), ("__1_0.distcp", 3),
    ]  # fmt: skip


def test_states_that_transformer_engines_layers_ask_for_are_there_once(tmp_path):
    write_megatron(tiny.write_llama(tmp_path / "hf", family="qwen3"), tmp_path / "megatron", Layout(tp=2, pp=2))
    modules = ["linear_qkv", "linear_proj", "core_attention", "q_layernorm", "k_layernorm"]
    expected = {f"self_attention.{module}" for module in modules} | {"mlp.linear_fc1", "mlp.linear_fc2"}
    names = {f"decoder.layers.{name}._extra_state/shard_{layer}_4" for name in expected for layer in range(4)}
    assert set(TorchDistFolder(tmp_path / "megatron").objects) == names | {
        "decoder.final_layernorm._extra_state/shard_0_1"
    }


def test_the_norm_before_experts_has_its_state_under_both_of_its_names(tmp_path):
    write_megatron(tiny.write_llama(tmp_path / "hf", family="mixtral"), tmp_path / "megatron", Layout())
    objects = TorchDistFolder(tmp_path / "megatron").objects
    for module in ("pre_mlp_layernorm", "mlp.linear_fc1"):
        assert {f"decoder.layers.{module}._extra_state/shard_{layer}_4" for layer in range(4)} <= set(objects)


def test_two_processes_write_the_same_files_as_one(tmp_path):
    source = tiny.write_llama(tmp_path / "hf", num_shards=3)
    for workers in (1, 2):
        write_megatron(source, tmp_path / f"megatron{workers}", Layout(tp=2), workers=workers)
        write_hugging_face(tmp_path / f"megatron{workers}", tmp_path / f"back{workers}", workers=workers)
    for folder in ("megatron", "back"):
        one, two = ({file.name: file.read_bytes() for file in (tmp_path / f"{folder}{n}").iterdir()} for n in (1, 2))
        assert one == two
    assert_same_files(tiny.write_llama(tmp_path / "single"), tmp_path / "back2")


def test_another_dtype_is_asked_for(tmp_path):
    source = tiny.write_llama(tmp_path / "hf", num_labels=1)
    write_megatron(source, tmp_path / "megatron", Layout(tp=2), dtype=torch.bfloat16)
    stored = TorchDistFolder(tmp_path / "megatron")
    assert stored.dtype("embedding.word_embeddings.weight") == torch.bfloat16
    assert stored.dtype("value_head.weight") == torch.float32


def model_of(folder, tp, pp, world_size):
    architecture = Architecture.from_folder(folder)
    head = "value" if architecture.num_labels else "vocabulary"
    groups = build_groups(Layout(tp=tp, pp=pp), world_size)
    return build_model(architecture, groups, head=head, dtype=torch.float32, seed=None)


def sharded_state(model):
    """megatron-core's own description of a rank's share (a GPTModel's insists on an output layer)."""
    from megatron.core.transformer.module import MegatronModule

    chunk, metadata = model.chunks[0], {"dp_cp_group": model.groups.collection.dp_cp}
    if model.head == "value":
        return MegatronModule.sharded_state_dict(chunk, metadata=metadata)
    return chunk.sharded_state_dict(metadata=metadata)


@contextmanager
def global_groups(pp):
    """megatron-core's loader asks its global groups about tied embeddings on several stages; megarlhf makes none."""
    from megatron.core import parallel_state

    if pp == 1:
        yield
        return
    parallel_state.destroy_global_memory_buffer()  # the one global that megarlhf does make
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pp)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def differing_after_megatron_loads(rank, world_size, source, checkpoint, tp, pp) -> list[str]:
    """Parameters that megatron-core's loader leaves different from those read from the Hugging Face folder."""
    from megatron.core import dist_checkpointing

    model, expected = (model_of(source, tp, pp, world_size) for _ in range(2))
    load_weights(expected, source)
    with global_groups(pp):
        loaded = dist_checkpointing.load(sharded_state(model), checkpoint)
    model.chunks[0].load_state_dict(loaded)
    right = expected.named_parameters()
    return [str(key) for key, value in model.named_parameters().items() if not torch.equal(value, right[key])]


LOADS = [(kind, tp, pp) for kind in KINDS for tp, pp in ((1, 1), (2, 1), (1, 2))]
LOADS += [("olmo2", 2, 1), ("phi3", 2, 1), ("gemma2", 1, 1), ("gemma3", 2, 1)]


@pytest.mark.parametrize(("kind", "tp", "pp"), LOADS)
def test_megatron_core_loads_what_was_written_for_another_layout(tmp_path, single_rank, kind, tp, pp):
    source = tiny.write_llama(tmp_path / "hf", **(KINDS | VARIANTS)[kind])
    written_for = Layout(tp=1, pp=1) if tp > 1 else Layout(tp=2, pp=2)
    write_megatron(source, tmp_path / "megatron", written_for)
    arguments = (str(source), str(tmp_path / "megatron"), tp, pp)
    if tp * pp == 1:
        assert differing_after_megatron_loads(0, 1, *arguments) == []
    else:
        assert run_on_ranks(2, differing_after_megatron_loads, *arguments) == [[], []]


def save_with_megatron(rank, world_size, source, checkpoint, tp, pp) -> None:
    from megatron.core import dist_checkpointing

    model = model_of(source, tp, pp, world_size)
    load_weights(model, source)
    if rank == 0:
        os.makedirs(checkpoint)
    torch.distributed.barrier()
    dist_checkpointing.save(sharded_state(model), checkpoint)


@pytest.mark.parametrize(("kind", "tp", "pp"), [("untied", 2, 1), ("value", 1, 2)])
def test_what_megatron_core_saved_is_read(tmp_path, kind, tp, pp):
    source = tiny.write_llama(tmp_path / "hf", **KINDS[kind])
    run_on_ranks(2, save_with_megatron, str(source), str(tmp_path / "megatron"), tp, pp)
    write_hugging_face(tmp_path / "megatron", tmp_path / "back", config=source)
    assert_same_files(source, tmp_path / "back")


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """A checkpoint to spoil copies of."""
    folder = tmp_path_factory.mktemp("written")
    write_megatron(tiny.write_llama(folder / "hf"), folder / "megatron", Layout(tp=2))
    return folder / "megatron"


@pytest.fixture
def copy(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "copy"))


class Attack:
    """Unpickled, it runs a shell command; a restricted reader must not get that far."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_a_pickle_that_runs_something_is_refused(copy, tmp_path):
    (copy / ".metadata").write_bytes(pickle.dumps(Attack(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match="system, which no checkpoint needs; nothing of it was run"):
        TorchDistFolder(copy)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("module_and_name", ["builtins.eval", "builtins.getattr", "torch.load", "torch.hub.load"])
def test_no_other_name_can_be_looked_up(module_and_name):
    module, name = module_and_name.rsplit(".", 1)
    with pytest.raises(CheckpointError, match="no checkpoint needs"):
        read_metadata(f"c{module}\n{name}\n.".encode(), "file")


def test_a_tensor_that_runs_something_is_refused(copy, tmp_path):
    class Tensor:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    block = TorchDistFolder(copy).blocks("output_layer.weight")[0]
    spoiled = tmp_path / "spoiled.pt"
    torch.save(Tensor(), spoiled)
    data = spoiled.read_bytes()
    assert len(data) <= block.length
    with (copy / block.file).open("r+b") as stream:
        stream.seek(block.offset + block.length - len(data))
        stream.write(data)
    with pytest.raises(CheckpointError, match="output_layer.weight at byte"):
        write_hugging_face(copy, tmp_path / "back")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "back").exists()


def test_a_damaged_table_is_told(copy):
    data = (copy / ".metadata").read_bytes()
    (copy / ".metadata").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="metadata: damaged"):
        TorchDistFolder(copy)


def test_a_missing_file_and_a_short_one_are_told(copy):
    last = copy / "__1_0.distcp"
    with last.open("r+b") as stream:
        stream.truncate(last.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="__1_0.distcp: ends at byte"):
        TorchDistFolder(copy)
    last.unlink()
    with pytest.raises(CheckpointError, match="__1_0.distcp: is not there"):
        TorchDistFolder(copy)


def test_a_table_cannot_point_outside_the_folder(copy):
    table = pickle.loads((copy / ".metadata").read_bytes())
    for info in table.storage_data.values():
        info.relative_path = "../" + info.relative_path
    (copy / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(CheckpointError, match="is not there"):
        TorchDistFolder(copy)


def test_a_checkpoint_of_another_model_is_told_by_tensor(copy, tmp_path):
    other = tiny.write_llama(tmp_path / "other", num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"linear_qkv.weight has shape \[4, 96, 32\], config.json says \[3, 96"):
        write_hugging_face(copy, tmp_path / "back", config=other)
    tied = tiny.write_llama(tmp_path / "tied", tied=True)
    with pytest.raises(CheckpointError, match="holds output_layer.weight, which is no part of this model"):
        write_hugging_face(copy, tmp_path / "back", config=tied)
    assert not (tmp_path / "back").exists()


def test_a_failed_conversion_leaves_nothing(copy, tmp_path):
    index = tmp_path / "hf"
    tiny.write_llama(index, num_shards=2)
    file = index / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors: not a readable"):
        write_megatron(index, tmp_path / "target", Layout())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "hf"]
