"""Every recipe can be read, its layouts fit the number of ranks that its README row states, and the table is whole."""

import re
from pathlib import Path

import pytest

from megarlhf.config import check
from megarlhf.config.load import load
from megarlhf.config.runs import COMMANDS, OnlineRun
from megarlhf.config.settings import PPORun
from megarlhf.rewards.functions import resolve

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted(path.name for path in EXAMPLES.glob("*.yaml"))


def table() -> dict[str, int]:
    """Ranks by recipe, as the README's table says."""
    rows = re.findall(r"^\| \[(\S+\.yaml)\]\(\1\) \|[^|]*\| (\d+) ", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    return {name: int(ranks) for name, ranks in rows}


def command(name: str) -> str:
    """The command that the recipe's own comment runs it with."""
    (found,) = set(re.findall(rf"megarlhf (\S+) examples/{re.escape(name)}$", text(name), re.MULTILINE))
    return found


def text(name: str) -> str:
    return (EXAMPLES / name).read_text()


def test_the_table_lists_every_recipe():
    assert sorted(table()) == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_valid_on_its_number_of_ranks(name):
    settings = load(COMMANDS[command(name)], EXAMPLES / name, [])
    assert check.violations(settings, table()[name]) == []
    assert settings.run.dir == f"runs/{name.removesuffix('.yaml')}"
    if isinstance(settings, OnlineRun):
        if "sentiment" in settings.reward.functions:
            pytest.importorskip("vaderSentiment")
        assert all(callable(resolve(spec)) for spec in settings.reward.functions)


def test_every_command_has_a_recipe():
    assert {command(name) for name in RECIPES} == set(COMMANDS)


def test_each_stage_starts_from_what_the_stage_before_exports():
    sft, rm, ppo = (load(COMMANDS[stage], EXAMPLES / f"pipeline_{stage}.yaml", []) for stage in ("sft", "rm", "ppo"))
    assert rm.reward.model == ppo.actor.model == f"{sft.run.dir}/hf"
    assert ppo.reward.model == f"{rm.run.dir}/hf" and not ppo.critic.model
    assert ppo.algorithm.critic_warmup_steps > 0, "scores are normalised, and the critic starts from a head of raw ones"


def test_the_quickstart_moves_weights_between_two_layouts():
    actor = load(PPORun, EXAMPLES / "quickstart.yaml", []).actor
    assert (actor.train.pp, actor.train.dp(2)) == (2, 1)
    assert (actor.generate.model_ranks, actor.generate.dp(2)) == (1, 2)
