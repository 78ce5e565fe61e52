"""The commands' words, exit codes and messages: 0 done, 1 failed or different, 2 bad input."""

import errno
import json
import os

import pytest
from safetensors.torch import load_file, save_file

from checkpoints_tools import command, compare, hf_to_megatron, inspect, megatron_to_hf, relayout
from tests import tiny


def outcome(main, *words) -> int:
    return command.guarded(main, [str(word) for word in words])


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    return tiny.write_llama(tmp_path_factory.mktemp("commands") / "hf")


@pytest.fixture(scope="session")
def converted(source):
    target = source.parent / "megatron"
    assert outcome(hf_to_megatron.main, source, target, "--tp", 2, "--pp", 2, "--workers", 2) == 0
    return target


def test_there_and_back_and_anew_are_the_same_model(source, converted, tmp_path, capsys):
    assert outcome(megatron_to_hf.main, converted, tmp_path / "hf", "--max-shard-bytes", 40000) == 0
    assert (tmp_path / "hf/model.safetensors.index.json").is_file()
    assert outcome(relayout.main, converted, tmp_path / "anew", "--tp", 4) == 0
    for other in (converted, tmp_path / "hf", tmp_path / "anew"):
        assert outcome(compare.main, source, other) == 0
    assert "39 tensors in A, 39 in B, 0 differ" in capsys.readouterr().out


def test_one_changed_number_is_found(source, converted, tmp_path, capsys):
    changed = tiny.write_llama(tmp_path / "changed")
    weights = load_file(changed / "model.safetensors")
    weights["model.layers.2.self_attn.k_proj.weight"][3, 5] += 1
    save_file(weights, changed / "model.safetensors")
    assert outcome(compare.main, changed, converted, "--json") == 1
    (found,) = json.loads(capsys.readouterr().out)["differences"]
    assert found["name"] == "model.layers.2.self_attn.k_proj.weight" and found["first"] == "1 of 768 differ"


def test_a_report_says_what_is_there(source, converted, capsys):
    reports = {}
    for folder in (source, converted):
        assert outcome(inspect.main, folder, "--json", "--fingerprint") == 0
        reports[folder] = json.loads(capsys.readouterr().out)
    assert reports[source]["fingerprint"] == reports[converted]["fingerprint"]
    assert reports[converted]["num_files"] == 4 and reports[converted]["family"] == "llama"
    assert outcome(inspect.main, converted) == 0
    assert "decoder.layers.mlp.linear_fc1.weight" in capsys.readouterr().out


def test_bad_input_is_code_2_with_a_next_move(source, tmp_path, capsys):
    odd = tiny.write_llama(tmp_path / "odd", model_type="mamba")
    for words in ((tmp_path / "none", tmp_path / "t"), (odd, tmp_path / "t"), (source, tmp_path / "t", "--tp", 3)):
        assert outcome(hf_to_megatron.main, *words) == 2
        assert capsys.readouterr().err.startswith("megarlhf: error: ")
    assert outcome(hf_to_megatron.main, source, odd) == 2
    assert "is there already" in capsys.readouterr().err
    assert not (tmp_path / "t").exists() and not list(tmp_path.glob(".*"))


def test_a_full_disk_is_code_1_and_leaves_nothing(source, tmp_path, monkeypatch, capsys):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert outcome(hf_to_megatron.main, source, tmp_path / "target") == 1
    assert "make room" in capsys.readouterr().err and not list(tmp_path.iterdir())
