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


def test_the_number_of_ranks_is_taken_in_any_spelling_and_a_slip_is_seen(recipe, capsys):
    assert main(["check", str(recipe), "--ranks=3"]) == 2
    assert "does not divide the 3 launched" in capsys.readouterr().err
    assert main(["check", str(recipe), "--rank", "2"]) == 2
    assert "--rank: no such setting; did you mean --ranks?" in capsys.readouterr().err


def test_rows_are_read_as_the_run_would_read_them(recipe, capsys):
    rows = recipe.parent / "rows.jsonl"
    rows.write_text('{"prompt": "a"\n{"text": "a"}\n{"score": 1}\n')
    assert main(["check", str(recipe), "--data.prompts", str(rows)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [f"megarlhf: error: {rows}:{number}: " in line for number, line in enumerate(told, 1)] == [True] * 3
    model, folder = str(recipe.parent / "actor"), str(recipe.parent / "run")
    words = ["check", "sft", "--actor.model", model, "--run.dir", folder, "--data.max_tokens", "8", "--ranks", "1"]
    assert main([*words, "--data.path", str(rows)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and f"{rows}:1: not JSON" in told[0] and f"{rows}:3: " in told[1]
    assert main([*words, "--data.path", f"{rows}x"]) == 2
    assert f"data.path: {rows}x is not there" in capsys.readouterr().err
    words[1:3] = ["rm", "--reward.model"]
    pairs = recipe.parent / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    assert main([*words, "--data.path", str(pairs)]) == 0
    assert main([*words, "--data.path", str(pairs), "--statistics.path", str(rows)]) == 2
    assert f"{rows}:2: " in capsys.readouterr().err
    ptx = ["--pretraining.path", str(rows), "--pretraining.coef", "1", "--pretraining.max_tokens", "8"]
    assert main(["check", str(recipe), *ptx]) == 2 and f"{rows}:3: " in capsys.readouterr().err


def test_what_the_run_downloads_is_said_to_be_unread(recipe, capsys):
    assert main(["check", str(recipe), "--data.prompts", "hub:somebody/prompts"]) == 0
    assert "\nnot read: data.prompts hub:somebody/prompts, which the run downloads\n" in capsys.readouterr().out


def test_names_of_the_hub_are_told_how_they_are_given(recipe, capsys):
    words = ["--actor.model", "somebody/Model-1", "--data.prompts", "somebody/prompts"]
    assert main(["check", str(recipe), *words]) == 2
    told = capsys.readouterr().err
    assert "somebody/Model-1: no config.json" in told and "hf download somebody/Model-1 --local-dir Model-1," in told
    assert "prompts is not there; " in told and "or hub:somebody/prompts for the hub's" in told
    assert main(["check", str(recipe), "--actor.model", "a/b/c", "--data.prompts", "data/prompts.jsonl"]) == 2
    told = capsys.readouterr().err
    assert "hf download" not in told and "hub:" not in told


def test_a_batch_larger_than_its_data_is_worth_a_word(recipe, caplog):
    assert main(["check", str(recipe)]) == 0 and not caplog.records
    assert main(["check", str(recipe), "--run.checkpoint_every", "1", "--run.keep_capsules", "3"]) == 0
    assert "run.keep_capsules: 3, but a capsule goes" in caplog.text
    assert main(["check", str(recipe), "--rollout.batch_size", "5"]) == 0
    assert "rollout.batch_size: 5 is more than the 4 rows of data.prompts" in caplog.text
    words = ["check", "sft", "--actor.model", str(recipe.parent / "actor"), "--run.dir", str(recipe.parent / "run")]
    text = recipe.parent / "text.jsonl"
    text.write_text('{"text": "abc"}\n')
    assert main([*words, "--data.path", str(text), "--data.max_tokens", "8"]) == 0
    assert "data.batch_size: 32 is more than the 1 rows of data.path" in caplog.text


def test_a_recipe_that_fits_several_commands_asks_which(recipe, capsys):
    settings = {"actor": {"model": str(recipe.parent / "actor")}, "run": {"dir": str(recipe.parent / "run")}}
    recipe.write_text(yaml.safe_dump(settings))
    assert main(["check", str(recipe)]) == 2
    assert "say which: megarlhf check " in capsys.readouterr().err
    assert main(["check", "nonsense.yaml"]) == 2 and main(["check", "ppo", str(recipe), "--ranks", "none"]) == 2
