"""What can go wrong, a row each: the exit code, what the message names, and no target that looks complete."""

import json
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
    assert message.startswith("error: ")
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
