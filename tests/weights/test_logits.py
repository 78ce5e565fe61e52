"""Logits of a checkpoint by megatron-core against those of the folder it came from by transformers."""

import io
import json
from contextlib import redirect_stdout

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints_tools import command, compare
from megarlhf.config.layout import Layout
from megarlhf.weights.convert import write_megatron
from tests import tiny
from tests.families import VARIANTS

TEXT = ["--text", "A text to read.", "--tokens", "3 17 99 0 5"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory, single_rank):
    """A folder and the checkpoint made from it."""
    top = tmp_path_factory.mktemp("logits")
    source = tiny.write_llama(top / "hf", llama3=True)
    write_megatron(source, top / "megatron", Layout(tp=2, pp=2))
    return source, top / "megatron"


def outcome(*words) -> int:
    return command.guarded(compare.main, [str(word) for word in words])


def test_the_formats_answer_alike_in_two_implementations(pair, capsys):
    assert outcome(*pair, *TEXT, "--json") == command.DONE
    texts = json.loads(capsys.readouterr().out)["texts"]
    assert [text["num_tokens"] for text in texts] == [15, 5]
    assert all(0 < text["relative"] < 1e-4 and text["same_choice"] == 1 and text["scale"] > 1 for text in texts)


def test_a_reward_model_answers_alike(tmp_path, single_rank, capsys):
    source = tiny.write_llama(tmp_path / "hf", num_labels=1)
    write_megatron(source, tmp_path / "megatron", Layout())
    assert outcome(source, tmp_path / "megatron", "--tokens", "3,17,5") == command.DONE
    assert "3 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("field", [{"rms_norm_eps": 1e-2}, {"rope_theta": 9000.0}])
def test_a_wrong_number_in_a_config_is_seen_though_every_weight_is_equal(pair, tmp_path, field, capsys):
    other = tiny.write_llama(tmp_path / "other", llama3=True, **field)
    assert outcome(pair[1], other, *TEXT) == command.FAILED
    assert "0 differ" in (said := capsys.readouterr().out) and "APART" in said


def test_swapped_gate_and_up_are_seen(pair, tmp_path, capsys):
    other = tiny.write_llama(tmp_path / "other", llama3=True)
    weights = load_file(other / "model.safetensors")
    gate, up = (f"model.layers.2.mlp.{which}_proj.weight" for which in ("gate", "up"))
    weights[gate], weights[up] = weights[up].clone(), weights[gate].clone()
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert outcome(pair[1], other, *TEXT) == command.FAILED
    assert "2 differ" in (said := capsys.readouterr().out) and said.count("APART") == 2


def swap_gate_and_up(weights):
    names = [name for name in weights if name.startswith("model.layers.1.") and "gate_proj" in name]
    for gate, up in [(name, name.replace("gate_proj", "up_proj")) for name in names]:
        weights[gate], weights[up] = weights[up].clone(), weights[gate].clone()


def roll_heads(weights):
    name = "model.layers.1.self_attn.q_proj.weight"
    weights[name] = weights[name].roll(tiny.HEAD_DIM, 0)


WRONG = {
    "epsilon": {"rms_norm_eps": 1e-2},
    "theta": {"rope_theta": 9000.0},
    "gate and up": swap_gate_and_up,
    "heads": roll_heads,
}


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_moe", "llama"])
def test_of_every_sort_of_family_a_wrong_reading_is_seen_after_conversion(tmp_path, single_rank, kind):
    settings = VARIANTS.get(kind, {"family": kind})
    source = tiny.write_llama(tmp_path / "hf", **settings)
    write_megatron(source, tmp_path / "megatron", Layout(tp=2, pp=2))
    ids = ("--tokens", " ".join(map(str, range(2, 60))))
    assert outcome(source, tmp_path / "megatron", *ids) == command.DONE
    for what, change in WRONG.items():
        fields = change if isinstance(change, dict) else {}
        other = tiny.write_llama(tmp_path / what, **settings | fields)
        if not fields:
            weights = load_file(other / "model.safetensors")
            change(weights)
            save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
        with redirect_stdout(io.StringIO()) as said:
            assert outcome(other, tmp_path / "megatron", *ids) == command.FAILED, what
        assert "APART" in said.getvalue(), what


def test_without_a_tokenizer_ids_are_asked_for(pair, tmp_path, capsys):
    for name in ("one", "two"):
        bare = tiny.write_llama(tmp_path / name, dtype=torch.bfloat16)
        for file in bare.glob("tokenizer*"):
            file.unlink()
    assert outcome(tmp_path / "one", tmp_path / "two", *TEXT) == command.BAD_INPUT
    assert '--tokens "5 17 3"' in capsys.readouterr().err
    assert outcome(tmp_path / "one", tmp_path / "two", "--tokens", 101) == command.BAD_INPUT
    assert "token 101 is not in the vocabulary of 101" in capsys.readouterr().err
