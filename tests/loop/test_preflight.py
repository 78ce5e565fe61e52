"""Everything that is wrong is told before anything is loaded, in one list, with the setting's name and a next move."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megarlhf.config.algorithms import RewardModelling
from megarlhf.config.corpus import Corpus
from megarlhf.config.layout import Layout
from megarlhf.config.load import to_yaml
from megarlhf.config.precision import FP8
from megarlhf.config.runs import RewardModelRun
from megarlhf.config.settings import (
    Actor,
    CorpusRun,
    Critic,
    Data,
    PPORun,
    Reference,
    Reward,
    RewardTrainee,
    Rollout,
    Run,
)
from megarlhf.errors import ConfigError
from megarlhf.loop.preflight import preflight
from tests.tiny import write_llama


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("preflight")
    write_llama(root / "actor", tied=True)
    write_llama(root / "reward", num_labels=1)
    write_llama(root / "labels", num_labels=2, id2label={"0": "kind", "1": "short"})
    write_llama(root / "odd", num_labels=1, megarlhf_score_mean=[0.0], megarlhf_score_std=[0.0])
    write_llama(root / "wider", hidden_size=64)
    write_llama(root / "other_words", num_labels=1, vocab_size=90)
    (root / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    return root


def good(models: Path, tmp_path: Path) -> PPORun:
    return PPORun(
        actor=Actor(model=str(models / "actor")),
        reward=Reward(model=str(models / "reward")),
        rollout=Rollout(batch_size=8, max_new_tokens=16),
        data=Data(prompts=str(models / "prompts.jsonl"), max_prompt_tokens=16),
        run=Run(dir=str(tmp_path / "run")),
    )


def test_good_settings_have_no_violation(models, tmp_path):
    assert preflight(good(models, tmp_path), 1) == []


def test_a_stop_token_is_one_token_of_the_actors_tokenizer(models, tmp_path):
    settings = good(models, tmp_path)
    rollout = replace(settings.rollout, stop_tokens=("x", "ab"))
    (told,) = preflight(replace(settings, rollout=rollout), 1)
    assert told.startswith("rollout.stop_tokens: 'ab' is 2 tokens")


def test_prompts_may_be_a_folder_and_labels_are_combined_by_weights(models, tmp_path):
    (tmp_path / "prompts").mkdir()
    settings = replace(
        good(models, tmp_path),
        reward=Reward(model=str(models / "labels"), attribute_weights=(1.0, 0.5)),
        critic=Critic(new_head="always"),
        data=Data(prompts=str(tmp_path / "prompts"), max_prompt_tokens=16),
    )
    assert preflight(settings, 1) == []


def rm(models: Path, tmp_path: Path, model: str, attributes: tuple[str, ...], **settings) -> RewardModelRun:
    return RewardModelRun(
        reward=RewardTrainee(model=str(models / model), **settings),
        algorithm=RewardModelling(loss="regression", attributes=attributes),
        data=Corpus(path=str(models / "prompts.jsonl"), max_tokens=64),
        run=CorpusRun(dir=str(tmp_path / "rm")),
    )


def test_a_head_that_is_trained_further_keeps_its_labels(models, tmp_path):
    for model, attributes, settings in (
        ("actor", ("a", "b", "c"), {}), ("labels", ("kind", "short"), {}), ("labels", ("a",), {"new_head": "always"}),
    ):  # fmt: skip
        assert preflight(rm(models, tmp_path, model, attributes, **settings), 1) == []
    for attributes in ((), ("short", "kind"), ("kind", "short", "funny")):
        (found,) = preflight(rm(models, tmp_path, "labels", attributes), 1)
        assert "has the labels kind, short, not" in found and "reward.new_head to always" in found
    (found,) = preflight(rm(models, tmp_path, "actor", (), new_head="never"), 1)
    assert "without a score head" in found
    (found,) = preflight(
        replace(rm(models, tmp_path, "actor", ("a",)), algorithm=RewardModelling(attributes=("a",))), 1
    )
    assert found.startswith("algorithm.attributes: a with loss preference")


CASES = {
    "a language model as reward model": (
        lambda root: {"reward": Reward(model=f"{root}/actor")},
        "reward.model",
        "give a SequenceClassification model",
    ),
    "a reward model as actor": (
        lambda root: {"actor": Actor(model=f"{root}/reward")},
        "actor.model",
        "causal language model",
    ),
    "a reference of other sizes": (
        lambda root: {"reference": Reference(model=f"{root}/wider")},
        "reference.model",
        "same sizes",
    ),
    "a reference here and elsewhere": (
        lambda root: {"reference": Reference(model=f"{root}/actor", url="http://127.0.0.1:1")},
        "reference.url: http://127.0.0.1:1 and reference.model",
        "keep the one to use",
    ),
    "a reference without an address": (
        lambda root: {"reference": Reference(url="127.0.0.1:8000")},
        "reference.url: '127.0.0.1:8000' is not an address",
        "write one like http://",
    ),
    "a reward server without an address": (
        lambda root: {"reward": Reward(functions=("http:///score",))},
        "reward.functions: 'http:///score' is not an address",
        "write one like http://",
    ),
    "a token that is not there": (
        lambda root: {"reward": Reward(functions=("http://a/score",), token_file=f"{root}/none")},
        "reward.token_file",
        "cannot be read as a token",
    ),
    "a critic that reads other tokens": (
        lambda root: {"critic": Critic(model=f"{root}/other_words")},
        "critic.model",
        "share a tokenizer",
    ),
    "tp that does not divide the heads": (
        lambda root: {"actor": Actor(model=f"{root}/actor", train=Layout(tp=3))},
        "actor.train: tp 3 does not divide 4 attention heads",
        "choose 1, 2 or 4",
    ),
    "more stages than layers": (
        lambda root: {"critic": Critic(train=Layout(pp=5))},
        "critic.train",
        "more than 4 layers",
    ),
    "sequences longer than the model's positions": (
        lambda root: {"rollout": Rollout(batch_size=8, max_new_tokens=100_000)},
        "rollout.max_new_tokens 100000",
        "positions",
    ),
    "an unknown reward function": (
        lambda root: {"reward": Reward(functions=("sentimnet",))},
        "reward.functions",
        "did you mean sentiment?",
    ),
    "no prompts": (
        lambda root: {"data": Data(prompts=f"{root}/none.jsonl")},
        "data.prompts",
        "none.jsonl is not there",
    ),
    "a critic of several labels": (
        lambda root: {"reward": Reward(model=f"{root}/labels", attribute_weights=(1.0, 0.5))},
        "critic.model: the score head of",
        "set critic.new_head to always",
    ),
    "several labels that nothing combines": (
        lambda root: {"reward": Reward(model=f"{root}/labels")},
        "reward.attribute_weights: 0 weights, but",
        "2 labels (kind, short), whose weighted sum is the score; give 2 weights",
    ),
    "weights for a single label": (
        lambda root: {"reward": Reward(model=f"{root}/reward", attribute_weights=(1.0,))},
        "reward.attribute_weights: [1.0]",
        "has one label",
    ),
    "weights without a reward model": (
        lambda root: {"reward": Reward(functions=("length",), attribute_weights=(1.0,))},
        "reward.attribute_weights",
        "reward.model, which is not set",
    ),
    "a new head that is forbidden": (
        lambda root: {"critic": Critic(model=f"{root}/actor", new_head="never")},
        "critic.model",
        "set critic.new_head to if_missing",
    ),
    "statistics that are none": (
        lambda root: {"reward": Reward(model=f"{root}/odd")},
        "reward.model: ",
        "megarlhf_score_std [0.0] are not 1 finite numbers each",
    ),
    "a folder without a model": (
        lambda root: {"actor": Actor(model=f"{root}/nowhere")},
        "actor.model",
        "config.json",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_violation_names_the_setting_and_the_next_move(case, models, tmp_path):
    change, setting, advice = CASES[case]
    found = preflight(replace(good(models, tmp_path), **change(models)), 60)
    assert any(setting in line and advice in line for line in found), found


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 100\n"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda file: file.unlink(), "no model.safetensors and no model.safetensors.index.json"),
        (lambda file: file.rename(file.with_name("pytorch_model.bin")), r"only pickled weights \(pytorch_model.bin\)"),
        (lambda file: file.write_bytes(file.read_bytes()[:-8]), "not a readable safetensors file"),
        (lambda file: file.write_bytes(POINTER), "a git-lfs pointer in place of the weights; run git lfs pull"),
    ],
)
def test_weights_that_cannot_be_loaded_are_told_before_the_run(damage, told, models, tmp_path):
    settings = replace(good(models, tmp_path), critic=Critic(model=str(models / "actor")))
    for name, role in (("actor", "actor"), ("reward", "reward"), ("actor", "reference")):
        folder = shutil.copytree(models / name, tmp_path / role)
        damage(folder / "model.safetensors")
        broken = replace(settings, **{role: replace(vars(settings)[role], model=str(folder))})
        (found,) = preflight(broken, 1)
        assert re.match(f"{role}.model: {folder}.*{told}", found), found


def test_a_package_that_is_asked_for_and_missing_is_told(models, tmp_path, monkeypatch):
    settings = good(models, tmp_path)
    settings = replace(settings, run=replace(settings.run, wandb="offline"))
    monkeypatch.setattr("megarlhf.loop.preflight.can_import", lambda module: module != "wandb")
    (told,) = preflight(settings, 1)
    assert told.startswith("run.wandb: offline, and the package wandb is not installed; pip install 'megarlhf[wandb]'")


def test_all_violations_come_at_once(models, tmp_path):
    broken = replace(
        good(models, tmp_path),
        reward=Reward(model=str(models / "actor")),
        data=Data(prompts=str(models / "none.jsonl")),
        reference=Reference(model=str(models / "wider")),
    )
    found = "\n".join(preflight(broken, 1))
    assert all(setting in found for setting in ("reward.model", "data.prompts", "reference.model"))


def test_a_folder_that_holds_a_run_is_refused_unless_told_otherwise(models, tmp_path):
    settings = good(models, tmp_path)
    Path(settings.run.dir).mkdir()
    (Path(settings.run.dir) / "metrics.jsonl").write_text("{}\n")
    assert any("already holds a run" in line for line in preflight(settings, 1))
    assert preflight(replace(settings, run=replace(settings.run, overwrite=True)), 1) == []


@pytest.mark.parametrize("held", ["checkpoints", "hf"])
def test_what_an_earlier_run_left_is_found_before_and_not_at_the_first_export(held, models, tmp_path):
    (tmp_path / "run" / held).mkdir(parents=True)
    assert any(f"already holds a run ({held})" in line for line in preflight(good(models, tmp_path), 1))


def test_a_folder_that_cannot_be_made_is_told_before_the_run(models, tmp_path):
    (tmp_path / "file").write_text("")
    settings = replace(good(models, tmp_path), run=Run(dir=str(tmp_path / "file/run")))
    (found,) = preflight(settings, 1)
    assert found.startswith("run.dir:") and "cannot be written: Not a directory; choose another folder" in found


def test_layers_te_are_refused_before_anything_is_loaded_where_they_cannot_be(models, tmp_path):
    from megarlhf.loop.launch import launch

    file = tmp_path / "te.yaml"
    settings = good(models, tmp_path)
    file.write_text(to_yaml(replace(settings, actor=replace(settings.actor, layers="te"))))
    with pytest.raises(ConfigError) as problem:
        launch("ppo", [str(file)])
    (line,) = problem.value.violations
    assert line.startswith("actor.layers: te needs Transformer Engine, which is not installed")


def test_sizes_that_fp8_products_cannot_have_are_named(models, tmp_path):
    settings = good(models, tmp_path)
    critic = replace(settings.critic, layers="te", fp8=FP8("blockwise"))
    found = preflight(replace(settings, critic=critic), 1)
    assert found and all(line.startswith("critic.train: tp 1 leaves a rank ") for line in found)
    assert all("FP8 products (blockwise) need a multiple of 16" in line for line in found)
