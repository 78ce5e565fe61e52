"""Which command a recipe is for: found where it is not said, and told where it is said wrong."""

from pathlib import Path

import pytest

from megarlhf.config.command import load_for, no_recipe
from megarlhf.config.runs import COMMANDS

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("command", "recipe", "right"),
    [("sft", "quickstart", "ppo"), ("ppo", "smollm2_dpo", "dpo"), ("rm", "smollm2_grpo", "grpo")],
)
def test_a_recipe_of_another_command_is_told_in_one_sentence(command, recipe, right):
    file = str(EXAMPLES / f"{recipe}.yaml")
    (found,) = load_for(command, [file], "megarlhf")[1]
    assert found.startswith(f"{file} is a recipe for {right}")
    assert found.endswith(f"not for {command}: megarlhf {right} {file}")


def test_what_is_wrong_in_any_case_is_told_too(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text((EXAMPLES / "quickstart.yaml").read_text().replace("num_epochs", "num_epoch"))
    right, typo = load_for("sft", [str(file)], "megarlhf")[1]
    assert "is a recipe for ppo, not for sft" in right and "did you mean algorithm.num_epochs?" in typo


def test_a_mistyped_setting_of_the_right_command_keeps_its_sentence(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text((EXAMPLES / "quickstart.yaml").read_text().replace("num_epochs", "num_epoch"))
    (found,) = load_for("ppo", [str(file)], "megarlhf")[1]
    assert "did you mean algorithm.num_epochs?" in found


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_recipe_the_next_move_is_told(command):
    said = no_recipe(command)
    assert f"megarlhf {command} FILE.yaml" in said and ("data.path" in said or "data.prompts" in said)
