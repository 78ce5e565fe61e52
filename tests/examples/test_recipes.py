"""Every recipe can be read, its layouts fit the number of ranks that its README row states, and the table is whole."""

import re
from pathlib import Path

import pytest

from megarlhf.config import check
from megarlhf.config.load import load
from megarlhf.config.settings import PPORun
from megarlhf.rewards.functions import resolve

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted(path.name for path in EXAMPLES.glob("*.yaml"))


def table() -> dict[str, int]:
    """Ranks by recipe, as the README's table says."""
    rows = re.findall(r"^\| \[(\S+\.yaml)\]\(\1\) \|[^|]*\| (\d+) ", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    return {name: int(ranks) for name, ranks in rows}


def test_the_table_lists_every_recipe():
    assert sorted(table()) == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_valid_on_its_number_of_ranks(name):
    settings = load(PPORun, EXAMPLES / name, [])
    if "sentiment" in settings.reward.functions:
        pytest.importorskip("vaderSentiment")
    assert check.violations(settings, table()[name]) == []
    assert all(callable(resolve(spec)) for spec in settings.reward.functions)
    assert settings.run.dir == f"runs/{Path(name).stem}"


def test_the_quickstart_moves_weights_between_two_layouts():
    actor = load(PPORun, EXAMPLES / "quickstart.yaml", []).actor
    assert (actor.train.pp, actor.train.dp(2)) == (2, 1)
    assert (actor.generate.model_ranks, actor.generate.dp(2)) == (1, 2)


def test_the_readmes_reward_function_works():
    (code,) = re.findall(r"```python\n(.*?)```", (EXAMPLES / "README.md").read_text(), re.DOTALL)
    namespace: dict = {}
    exec(code, namespace)
    assert namespace["politeness"](["p", "p"], ["yes please", "no"], [{}, {}]) == [1.0, 0.0]
