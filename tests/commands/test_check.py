"""`megarlhf check` says what a launch would find wrong, and starts nothing."""

import pytest
import yaml

from megarlhf.cli import main
from tests.learning.toy import write_actor, write_prompts


@pytest.fixture
def recipe(tmp_path):
    write_actor(tmp_path / "actor")
    write_prompts(tmp_path / "prompts.jsonl", count=4)
    settings = {
        "actor": {"model": str(tmp_path / "actor"), "train": {"pp": 2}},
        "critic": {"train": {"tp": 2}},
        "reward": {"functions": ["length"]},
        "rollout": {"batch_size": 4, "max_new_tokens": 6},
        "data": {"prompts": str(tmp_path / "prompts.jsonl"), "max_prompt_tokens": 8},
        "run": {"dir": str(tmp_path / "run")},
    }
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "toy.yaml"


def test_a_good_recipe_is_said_to_be_good_and_leaves_nothing_behind(recipe, capsys):
    assert main(["check", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert "megarlhf ppo: nothing is wrong on 2 ranks" in out and "megatron-core 0." in out and "torch 2." in out
    assert not (recipe.parent / "run").exists()


def test_everything_wrong_is_one_list(recipe, capsys):
    wrong = ["--ranks", "3", "--data.prompts", "nowhere.jsonl", "--rollout.max_new_tokens", "500"]
    assert main(["check", str(recipe), *wrong]) == 2
    err = capsys.readouterr().err
    assert "does not divide the 3 launched" in err and "nowhere.jsonl" in err and "exceed its 128 positions" in err


def test_a_recipe_that_fits_several_commands_asks_which(recipe, capsys):
    settings = {"actor": {"model": str(recipe.parent / "actor")}, "run": {"dir": str(recipe.parent / "run")}}
    recipe.write_text(yaml.safe_dump(settings))
    assert main(["check", str(recipe)]) == 2
    assert "say which: megarlhf check " in capsys.readouterr().err
    assert main(["check", "nonsense.yaml"]) == 2 and main(["check", "ppo", str(recipe), "--ranks", "none"]) == 2
