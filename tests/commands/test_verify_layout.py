"""`megarlhf verify-layout`: what it refuses, and one run that starts its own ranks."""

import json
import subprocess
import sys

import pytest

from megarlhf.commands.verify_layout import main
from megarlhf.errors import ConfigError
from tests.loop.test_verification import write_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("verify_layout"))


def test_what_is_wrong_is_told_before_a_rank_starts(folder):
    with pytest.raises(ConfigError) as error:
        main(["ppo", str(folder / "ppo.yaml"), "--layouts", "tp3,pp9", "--actor.optimizer.learning_rate", "-1"])
    for words in ("--layouts tp3: tp 3 does not divide 4 attention heads", "--layouts pp9: pp 9", "learning_rate: -1"):
        assert any(words in violation for violation in error.value.violations), error.value.violations


def test_a_recipe_that_fits_several_commands_asks_which(folder):
    with pytest.raises(ConfigError, match=r"could be for .*; say which: megarlhf verify-layout ppo .*ppo\.yaml"):
        main([str(folder / "ppo.yaml")])


@pytest.mark.slow
def test_the_command_starts_its_own_ranks_and_fails_when_a_difference_is_too_large(folder):
    command = [sys.executable, "-m", "megarlhf", "verify-layout", "ppo", str(folder / "ppo.yaml"), "--json"]
    command += ["--layouts", "tp2+sp", "--loss_tolerance", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    rows = [json.loads(row) for row in done.stdout.splitlines()]
    assert [(row["model"], row["layout"], row["ranks"]) for row in rows] == [
        (model, layout, ranks) for model in ("actor", "critic") for layout, ranks in (("one process", 1), ("tp2+sp", 2))
    ]
    assert done.returncode == 1 and not all(row["passed"] for row in rows)
    assert all(row["differences"]["gradients"] < 1e-5 for row in rows)
