"""Score heads under every library's names are the same linear layer here, and leave as transformers spells them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarlhf.config.layout import Layout
from megarlhf.errors import CheckpointError
from megarlhf.models.architecture import Architecture
from megarlhf.models.build import build_model
from megarlhf.models.score_config import ScoreRule, ScoreStatistics, score_rule
from megarlhf.parallel.groups import build_groups
from megarlhf.records.experience import Experience
from megarlhf.weights.convert import write_hugging_face, write_megatron
from megarlhf.weights.export import export_model
from megarlhf.weights.load import load_weights
from tests import tiny
from tests.distributed.pool import run_on_ranks

ONE = Layout()
LABELS = ("helpful", "correct", "short")
STYLES = {
    "transformers, sequences": ("score", False, {"architectures": ["LlamaForSequenceClassification"]}),
    "transformers, tokens": ("score", True, {"architectures": ["LlamaForTokenClassification"]}),
    "tokens without a bias": ("score", False, {"architectures": ["LlamaForTokenClassification"]}),
    "OpenRLHF": ("score", False, {"architectures": ["RewardModel"], "value_head_prefix": "score"}),
    "OpenRLHF, a name of its own": (
        "my_head",
        False,
        {"architectures": ["CriticModel"], "value_head_prefix": "my_head"},
    ),
    "OpenRLHF before that": ("value_head", False, {}),
    "TRL": ("v_head.summary", True, {}),
    "TRL without its wrapper": ("v_head", False, {}),
    "a reward head": ("reward_head", True, {}),
    "an output layer of one row": ("lm_head", False, {}),
}


def write_styled(folder: Path, prefix: str, has_bias: bool, num_labels: int = 1, **changes) -> Path:
    """A tiny model with its head under `prefix`; TRL's stand next to a language model."""
    tiny.write_llama(folder, num_labels=num_labels)
    weights = load_file(folder / "model.safetensors")
    weights[f"{prefix}.weight"] = weights.pop("score.weight")
    if has_bias:
        weights[f"{prefix}.bias"] = torch.linspace(0.5, 1.5, num_labels)
    if prefix.startswith("v_head"):
        weights["lm_head.weight"] = torch.ones(tiny.VOCAB, tiny.HIDDEN)
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]} | changes
    if not config["architectures"][0].endswith("Classification"):
        config = {key: value for key, value in config.items() if key not in ("num_labels", "id2label", "label2id")}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def by_hand(folder: Path, prefix: str, ids: torch.Tensor) -> torch.Tensor:
    """[K] at the last token: transformers' body, then the head's tensors as a matrix and a vector."""
    from transformers import LlamaConfig, LlamaModel

    weights = load_file(folder / "model.safetensors")
    body = LlamaModel(LlamaConfig(**json.loads((folder / "config.json").read_text()))).float().eval()
    body.load_state_dict({name[6:]: tensor for name, tensor in weights.items() if name.startswith("model.")})
    with torch.no_grad():
        last = body(ids[None]).last_hidden_state[0, -1]
    return weights[f"{prefix}.weight"] @ last + weights.get(f"{prefix}.bias", 0)


IDS = torch.tensor([5, 80, 33, 12, 64, 7, 21])


def loaded(folder: Path, layout: Layout = ONE, world_size: int = 1, **settings):
    architecture = Architecture.from_folder(folder)
    model = build_model(architecture, build_groups(layout, world_size), head="value", dtype=torch.float32, seed=None)
    return model, load_weights(model, folder, **settings)


def scores(model) -> torch.Tensor:
    """[K] of the sequence IDS, by the scorer."""
    from megarlhf.engines.scorer import RewardModelScorer

    row = {"row_id": [0], "group": [0], "finished": [True]}
    batch = Experience.from_completions([IDS[:3].tolist()], [IDS[3:].tolist()], None, **row)
    return RewardModelScorer(model, 64).raw_scores(batch)[0]


@pytest.mark.parametrize("style", STYLES)
def test_every_style_is_read_used_and_exported_for_transformers(style, tmp_path, single_rank):
    prefix, has_bias, changes = STYLES[style]
    folder = write_styled(tmp_path / "from", prefix, has_bias, **changes)
    model, report = loaded(folder)
    expected = by_hand(folder, prefix, IDS)
    assert report.head == prefix
    assert report.ignored == (("lm_head.weight",) if prefix.startswith("v_head") else ())
    torch.testing.assert_close(scores(model), expected, rtol=0, atol=2e-5)
    export_model(model, tmp_path / "to", source_folder=folder)
    assert_transformers_agrees(tmp_path / "to", has_bias, expected)


def assert_transformers_agrees(folder: Path, has_bias: bool, expected: torch.Tensor) -> None:
    """The folder is a classifier of transformers, whole, and says how it is read."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    config = json.loads((folder / "config.json").read_text())
    kind = "TokenClassification" if has_bias else "SequenceClassification"
    assert config["architectures"] == [f"LlamaFor{kind}"] and config["megarlhf_pooling"] == "last_token"
    assert "value_head_prefix" not in config
    classifier = AutoModelForTokenClassification if has_bias else AutoModelForSequenceClassification
    judge, report = classifier.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        logits = judge.eval().float()(IDS[None]).logits[0]
    torch.testing.assert_close(logits[-1] if has_bias else logits, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("style", ["TRL", "an output layer of one row", "OpenRLHF"])
def test_converters_read_every_style_and_keep_the_head_bit_for_bit(style, tmp_path):
    prefix, has_bias, changes = STYLES[style]
    statistics = {"normalize_reward": True, "mean": 0.1, "std": 1.7} if style == "OpenRLHF" else {}
    folder = write_styled(tmp_path / "from", prefix, has_bias, **changes, **statistics)
    write_megatron(folder, tmp_path / "megatron", Layout(tp=2, pp=2))
    write_hugging_face(tmp_path / "megatron", tmp_path / "back")
    original, back = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert torch.equal(back["score.weight"], original[f"{prefix}.weight"]) and "lm_head.weight" not in back
    assert ("score.bias" in back) == has_bias
    assert not has_bias or torch.equal(back["score.bias"], original[f"{prefix}.bias"])
    assert_transformers_agrees(tmp_path / "back", has_bias, by_hand(folder, prefix, IDS))
    assert Architecture.from_folder(tmp_path / "back") == Architecture.from_folder(folder)
    assert score_rule(tmp_path / "back", (), normalise=True) == score_rule(folder, (), normalise=True)


def several_labels_on_rank(rank, world_size, layout, folder, target):
    model, _ = loaded(folder, layout, world_size)
    export_model(model, target, source_folder=folder)
    return scores(model)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("layout", [Layout(tp=2, sp=True), Layout(pp=2)], ids=str)
def test_several_labels_are_scored_and_exported_under_any_layout(layout, has_bias, tmp_path):
    kind = "LlamaForTokenClassification" if has_bias else "LlamaForSequenceClassification"
    names = {"id2label": dict(enumerate(LABELS)), "architectures": [kind]}
    folder = write_styled(tmp_path / "from", "score", has_bias, num_labels=3, **names)
    expected = by_hand(folder, "score", IDS)
    for found in run_on_ranks(2, several_labels_on_rank, layout, folder, tmp_path / "to"):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert_transformers_agrees(tmp_path / "to", has_bias, expected)
    config = json.loads((tmp_path / "to/config.json").read_text())
    assert list(config["id2label"].values()) == list(LABELS) and config["problem_type"] == "regression"
    original, exported = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "to"))
    assert all(torch.equal(exported[name], tensor) for name, tensor in original.items())


def test_what_is_no_single_linear_head_is_refused(tmp_path, single_rank):
    folder = write_styled(tmp_path / "two", "score", False)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"v_head.weight": weights["score.weight"].clone()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds 2 heads \(score.weight, v_head.weight\)"):
        Architecture.from_folder(folder)
    mlp = write_styled(tmp_path / "mlp", "v_head", False)
    weights = load_file(mlp / "model.safetensors")
    layers = {"v_head.0.weight": torch.ones(64, 32), "v_head.2.weight": torch.ones(1, 64)}
    del weights["v_head.weight"]
    save_file(weights | layers, mlp / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds v_head.0.weight"):
        loaded(mlp, new_value_head=True)
    other = write_styled(
        tmp_path / "rows", "score", False, num_labels=2, architectures=["LlamaForSequenceClassification"]
    )
    config = json.loads((other / "config.json").read_text()) | {"num_labels": 1, "id2label": {"0": "a"}}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"score.weight has shape \[2, 32\], config.json says \[1, 32\]"):
        loaded(other)


def test_statistics_are_kept_to_the_last_bit_and_applied(tmp_path, single_rank):
    folder = write_styled(
        tmp_path / "from", "score", False, num_labels=3, architectures=["LlamaForSequenceClassification"]
    )
    model, _ = loaded(folder)
    kept = ScoreStatistics((0.1, -1 / 3, 1e-17), (2**0.5, 1e300, 5e-324))
    export_model(model, tmp_path / "to", source_folder=folder, entries=kept.entries())
    weights = (1.0, 2.0, -0.5)
    rule = score_rule(tmp_path / "to", weights, normalise=True)
    assert rule == ScoreRule(weights, kept)
    assert score_rule(tmp_path / "to", weights, normalise=False) == ScoreRule(weights, None)
    export_model(model, tmp_path / "again", source_folder=tmp_path / "to")
    assert score_rule(tmp_path / "again", weights, normalise=True).statistics is None, "other weights, other scores"
    simple = ScoreRule((2.0, -1.0), ScoreStatistics((1.0, 10.0), (0.5, 4.0)))
    assert simple.combined(torch.tensor([[2.0, 10.0], [1.0, 14.0]])).tolist() == [4.0, -1.0]


def test_statistics_that_cannot_be_applied_are_refused(tmp_path):
    for number, change in enumerate(
        ({"megarlhf_score_mean": [0.0]}, {"megarlhf_score_mean": [0.0, 1.0], "megarlhf_score_std": [1.0, 1.0]},
         {"megarlhf_score_mean": [0.0], "megarlhf_score_std": [0.0]}, {"normalize_reward": True, "mean": "a", "std": 1})
    ):  # fmt: skip
        folder = tiny.write_llama(tmp_path / str(number), num_labels=1, **change)
        with pytest.raises(CheckpointError, match="are not 1 finite numbers each"):
            score_rule(folder, (), normalise=True)
        assert score_rule(folder, (), normalise=False) == ScoreRule()


def test_a_padding_id_that_ends_answers_is_told_with_what_transformers_makes_of_it(tmp_path, single_rank, caplog):
    """The scores of [..., end] differ: transformers' is the one of the row without its end."""
    from transformers import AutoModelForSequenceClassification

    folder = tiny.write_llama(tmp_path / "from", num_labels=1, pad_token_id=0)
    model, _ = loaded(folder)
    export_model(model, tmp_path / "to", source_folder=folder)
    assert "pad_token_id 0 ends answers too" in caplog.text
    judge = AutoModelForSequenceClassification.from_pretrained(tmp_path / "to").eval()
    ended = torch.cat([IDS, torch.tensor([0])])
    with torch.no_grad():
        torch.testing.assert_close(judge(ended[None]).logits[0], judge(IDS[None]).logits[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(judge(IDS[None]).logits[0], by_hand(folder, "score", IDS), rtol=0, atol=2e-5)
    assert (scores(model) - by_hand(folder, "score", IDS)).abs().max() < 2e-5
    caplog.clear()
    model, _ = loaded(tiny.write_llama(tmp_path / "other", num_labels=1))
    export_model(model, tmp_path / "quiet", source_folder=tmp_path / "other")
    assert not caplog.text
