"""What can go wrong, a row each: the exit code, what the message names, and no target that looks complete."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints_tools import command, compare, hf_to_megatron, megatron_to_hf
from megarlhf.config.layout import Layout
from megarlhf.telemetry.progress import ByteProgress
from megarlhf.weights.convert import write_hugging_face, write_megatron
from megarlhf.weights.journal import journal_of
from megarlhf.weights.partial import partial_of
from tests import tiny

SHARD = "model-00002-of-00003.safetensors"
NORM = "model.layers.1.input_layernorm.weight"


def edit_weights(folder, change):
    file = next(file for file in sorted(folder.glob("*.safetensors")) if NORM in load_file(file))
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def halve_keys(folder):
    for file in folder.glob("*.safetensors"):
        weights = {name: w.half() if "k_proj" in name else w for name, w in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})


def edit_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def cut_short(file):
    data = file.read_bytes()
    file.write_bytes(data[: len(data) * 2 // 3])


def move_shard_outside(folder):
    (folder / SHARD).rename(folder.parent / SHARD)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(SHARD, f"../{SHARD}"))


def remove_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()


HF_FAILURES = {
    "a deleted shard": (
        lambda f: (f / SHARD).unlink(),
        [SHARD, "model.embed_tokens.weight", "download the folder again"],
    ),
    "a truncated shard": (lambda f: cut_short(f / SHARD), [SHARD, "not a readable safetensors", "download it again"]),
    "an extra tensor": (
        lambda f: edit_weights(f, lambda weights: weights.update(odd=torch.zeros(3))),
        ["model-0000", "odd", "download them again"],
    ),
    "a missing tensor": (
        lambda f: edit_weights(f, lambda weights: weights.pop(NORM)),
        ["model-0000", NORM, "download them again"],
    ),
    "a wrong shape": (
        lambda f: edit_weights(f, lambda weights: weights.update({NORM: torch.zeros(31)})),
        ["model-0000", NORM, "[31]", "[32]", "use a matching pair"],
    ),
    "two dtypes in one weight": (halve_keys, ["k_proj", "float16", "give --dtype"]),
    "a layer of another dtype": (
        lambda f: edit_weights(f, lambda weights: weights.update({NORM: weights[NORM].bfloat16()})),
        ["linear_qkv.layer_norm_weight", "bfloat16", "float32", "give --dtype"],
    ),
    "an index that leaves the folder": (
        lambda f: move_shard_outside(f),
        ["model.safetensors.index.json", f"../{SHARD}", "outside of the folder"],
    ),
    "a number that is none": (
        lambda f: edit_config(f, rms_norm_eps=float("nan")),
        ["config.json", "rms_norm_eps is nan", "expected a number"],
    ),
    "no tokenizer": (remove_tokenizer, ["tokenizer.json", "--without-tokenizer"]),
    "an unknown architecture": (
        lambda f: edit_config(f, model_type="mamba"),
        ["config.json", "'mamba' is not supported", "'llama'"],
    ),
    "no config": (lambda f: (f / "config.json").unlink(), ["no config.json", "give the folder"]),
}
MEGATRON_FAILURES = {
    "a deleted file": (
        lambda f: (f / "__1_0.distcp").unlink(),
        ["__1_0.distcp", "is not there", "copy the checkpoint"],
    ),
    "a truncated file": (
        lambda f: cut_short(f / "__1_0.distcp"),
        ["__1_0.distcp", "ends at byte", "copy the checkpoint"],
    ),
    "no table": (lambda f: (f / ".metadata").unlink(), ["source", "no .metadata file", "give the folder"]),
    "a config of another shape": (
        lambda f: edit_config(f, intermediate_size=60),
        ["linear_fc1.weight", "[4, 112, 32]", "[4, 120, 32]", "use a pair"],
    ),
    "a config of a tied model": (
        lambda f: edit_config(f, tie_word_embeddings=True),
        ["output_layer.weight", "no part of this model"],
    ),
    "no tokenizer": (remove_tokenizer, ["tokenizer.json", "--without-tokenizer"]),
}


def refused(main, source, capsys, parts) -> None:
    before = set(source.parent.iterdir())
    assert command.guarded(main, [str(source), str(source.parent / "target")]) == command.BAD_INPUT
    message = capsys.readouterr().err
    assert message.startswith("megarlhf: error: ")
    for part in parts:
        assert part in message, message
    assert set(source.parent.iterdir()) == before


@pytest.mark.parametrize("failure", HF_FAILURES)
def test_a_spoiled_hugging_face_folder_is_refused(failure, tmp_path, capsys):
    spoil, parts = HF_FAILURES[failure]
    source = tiny.write_llama(tmp_path / "source", num_shards=3)
    spoil(source)
    refused(hf_to_megatron.main, source, capsys, parts)


@pytest.mark.parametrize("failure", MEGATRON_FAILURES)
def test_a_spoiled_checkpoint_is_refused(failure, tmp_path, capsys):
    spoil, parts = MEGATRON_FAILURES[failure]
    write_megatron(tiny.write_llama(tmp_path / "hf"), tmp_path / "source", Layout(tp=2))
    spoil(tmp_path / "source")
    refused(megatron_to_hf.main, tmp_path / "source", capsys, parts)


def test_virtual_stages_of_a_single_one_are_refused(tmp_path, capsys):
    words = [str(tmp_path / "source"), str(tmp_path / "target"), "--vp", "2"]
    assert command.guarded(hf_to_megatron.main, words) == command.BAD_INPUT
    assert "--vp 2: virtual stages are pieces of a pipeline rank, and --pp is 1" in capsys.readouterr().err


def test_without_a_tokenizer_when_asked(tmp_path):
    source = tiny.write_llama(tmp_path / "source")
    remove_tokenizer(source)
    assert command.guarded(hf_to_megatron.main, [str(source), str(tmp_path / "t"), "--without-tokenizer"]) == 0


@contextmanager
def largest_file(num_bytes: int):
    """The kernel refuses to let a file grow beyond this, as a full quota would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_for_a_file_leaves_nothing(tmp_path, capsys):
    source = tiny.write_llama(tmp_path / "source")
    with largest_file(20_000):
        assert command.guarded(hf_to_megatron.main, [str(source), str(tmp_path / "target")]) == command.FAILED
    message = capsys.readouterr().err
    assert "File too large" in message and "make room or choose another disk" in message
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_disk_that_fills_up_is_told_with_the_file(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    source = tiny.write_llama(tmp_path / "source")
    monkeypatch.setattr(os, "pwrite", full)
    assert command.guarded(hf_to_megatron.main, [str(source), str(tmp_path / "target")]) == command.FAILED
    message = capsys.readouterr().err
    assert ".target.partial/__0_0.distcp" in message and "make room or choose another disk" in message
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


class Interrupted(ByteProgress):
    """Ctrl-C after some units."""

    def __init__(self, after: int):
        super().__init__(None)
        self.said = []
        self._left = after

    def say(self, text):
        self.said.append(text)

    def advance(self, num_bytes):
        super().advance(num_bytes)
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


NEVER = -1


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("write", [lambda *at, **by: write_megatron(*at, Layout(tp=2), **by), write_hugging_face])
def test_an_interrupted_conversion_goes_on_and_reads_again_what_it_had(tmp_path, write):
    source, target = tiny.write_llama(tmp_path / "source"), tmp_path / "target"
    with pytest.raises(KeyboardInterrupt):
        write(source, target, progress=Interrupted(after=20))
    assert not target.exists() and partial_of(target).is_dir()
    lines = [json.loads(line) for line in journal_of(target).read_text().splitlines()]
    assert len(lines) == 21
    spoiled = partial_of(target) / lines[5]["file"]
    with spoiled.open("r+b") as stream:  # a unit that the journal has, and the disk has not
        stream.seek(lines[5]["offset"])
        stream.write(bytes(600))
    journal_of(target).write_text(journal_of(target).read_text() + '{"file": "__0')  # torn by a kill
    second = Interrupted(after=NEVER)
    write(source, target, progress=second)
    assert len(second.said) == 1 and "going on with what an earlier run left" in second.said[0]
    write(source, tmp_path / "at once")
    assert files_of(target) == files_of(tmp_path / "at once")
    assert not partial_of(target).exists() and not journal_of(target).exists()


@pytest.mark.parametrize("change", ["options", "source"])
def test_another_conversion_to_the_same_place_starts_afresh(tmp_path, change):
    source, target = tiny.write_llama(tmp_path / "source"), tmp_path / "target"
    with pytest.raises(KeyboardInterrupt):
        write_megatron(source, target, Layout(tp=2), progress=Interrupted(after=20))
    layout, what = Layout(tp=2), "a source that has changed"
    if change == "options":
        layout, what = Layout(tp=4), "other options"
    else:
        tiny.write_llama(source, seed=1)
    second = Interrupted(after=NEVER)
    write_megatron(source, target, layout, progress=second)
    assert what in second.said[0] and "starting afresh" in second.said[0]
    assert command.guarded(compare.main, [str(source), str(target)]) == command.DONE


def test_two_at_once_do_not_write_one_folder(tmp_path, capsys):
    source, target = tiny.write_llama(tmp_path / "source"), tmp_path / "target"

    class Rival(ByteProgress):
        def advance(self, num_bytes):
            assert command.guarded(hf_to_megatron.main, [str(source), str(target)]) == command.BAD_INPUT

    write_megatron(source, target, Layout(), progress=Rival())
    assert "another process is writing it now" in capsys.readouterr().err
    assert command.guarded(compare.main, [str(source), str(target)]) == command.DONE


def test_a_killed_process_leaves_no_target_and_the_next_one_goes_on(tmp_path):
    sizes = {"num_hidden_layers": 200, "hidden_size": 64}
    source, target = tiny.write_llama(tmp_path / "source", **sizes), tmp_path / "target"
    words = [sys.executable, "-m", "checkpoints_tools.hf_to_megatron", str(source), str(target), "--workers", "2"]
    process = subprocess.Popen(words, cwd=Path(__file__).parents[2])
    while process.poll() is None:
        if journal_of(target).is_file() and journal_of(target).read_bytes().count(b"\n") > 30:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.001)
    assert process.wait() == -signal.SIGKILL
    assert not target.exists() and partial_of(target).is_dir()
    progress = Interrupted(after=NEVER)
    write_megatron(source, target, Layout(), progress=progress)
    assert "going on with what an earlier run left" in progress.said[0]
    assert command.guarded(compare.main, [str(source), str(target)]) == command.DONE


@pytest.mark.parametrize("left", [b"\xff\xfe\x00\n", b'{"a": 1}\n{"x": 1}\n', b"[]\n3\n", b'"x"\n'])
def test_a_journal_that_is_none_is_not_believed(tmp_path, left):
    source, target = tiny.write_llama(tmp_path / "source"), tmp_path / "target"
    journal_of(target).write_bytes(left)
    partial_of(target).mkdir()
    assert command.guarded(hf_to_megatron.main, [str(source), str(target)]) == command.DONE
    assert command.guarded(compare.main, [str(source), str(target)]) == command.DONE


def test_an_interrupt_at_the_very_end_can_be_gone_on_from(tmp_path, monkeypatch):
    source, target = tiny.write_llama(tmp_path / "source"), tmp_path / "target"
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates/tools.jinja").write_text("{{ tools }}")

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("megarlhf.weights.convert.finish_folder", interrupted)
        assert command.guarded(hf_to_megatron.main, [str(source), str(target)]) == command.INTERRUPTED
    assert command.guarded(hf_to_megatron.main, [str(source), str(target)]) == command.DONE
    assert (target / "additional_chat_templates/tools.jinja").read_text() == "{{ tools }}"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_is_written_where_it_points(tmp_path, is_there):
    source, place, link = tiny.write_llama(tmp_path / "source"), tmp_path / "place", tmp_path / "link"
    if is_there:
        place.mkdir()
    link.symlink_to(place)
    assert command.guarded(hf_to_megatron.main, [str(source), str(link)]) == command.DONE
    assert link.is_symlink() and (place / ".metadata").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "place", "source"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_no_number_keeps_its_bits_in_a_tied_copy_too(tmp_path, dtype):
    source = tiny.write_llama(tmp_path / "source", dtype=dtype, tied=True)
    weights = load_file(source / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    bits = embedding.view({4: torch.int32, 2: torch.int16}[dtype.itemsize])
    special = torch.tensor([float("inf"), float("-inf"), -0.0, float("nan")], dtype=dtype)
    embedding[3, :4] = special
    bits[3, 4] = bits[3, 3] + 1  # a NaN with another payload
    save_file(weights | {"lm_head.weight": embedding.clone()}, source / "model.safetensors", metadata={"format": "pt"})
    write_megatron(source, tmp_path / "megatron", Layout(tp=2))
    write_hugging_face(tmp_path / "megatron", tmp_path / "back")
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == weights.keys()
    for name, tensor in back.items():
        assert torch.equal(tensor.view(torch.uint8), weights[name].view(torch.uint8)), name


def test_a_cast_that_would_make_a_number_infinite_is_refused(tmp_path, capsys):
    source = tiny.write_llama(tmp_path / "source")
    edit_weights(source, lambda weights: weights[NORM].__setitem__(5, 1e6))
    words = [str(source), str(tmp_path / "target"), "--dtype"]
    assert command.guarded(hf_to_megatron.main, [*words, "fp16"]) == command.BAD_INPUT
    message = capsys.readouterr().err
    assert NORM in message and "1e+06, too large for torch.float16" in message and "--dtype bf16" in message
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert command.guarded(hf_to_megatron.main, [*words, "bf16"]) == command.DONE
