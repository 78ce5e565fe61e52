"""Recipes for GPUs, planned without weights: they break no rule, fit 80 GB, and the table of them is current."""

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megarlhf.config.load import load
from megarlhf.config.runs import COMMANDS
from megarlhf.loop.planner.gpus import gpu_named
from megarlhf.loop.planner.plan import make_plan
from megarlhf.models.architecture import Architecture
from megarlhf.parallel.grid import Grid

EXAMPLES = Path(__file__).parents[2] / "examples"
ARCHITECTURES = sorted((EXAMPLES / "architectures").glob("*.json"))
LANGUAGE_MODELS = [path for path in ARCHITECTURES if not path.stem.endswith("-Reward")]


def module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


TABLE = module(EXAMPLES / "recipes/table.py")
RECIPES = {f"{path.parent.name}/{path.stem}": path for path in TABLE.recipes()}


@pytest.fixture(scope="module")
def plans():
    return {name: TABLE.planned(path) for name, path in RECIPES.items()}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_breaks_no_rule_and_fits_gpus_of_80_gigabytes(name, plans):
    plan = plans[name]
    assert not plan.violations
    assert plan.fits and plan.peak_bytes <= (79.6 - 4) * 2**30
    for model in plan.cast.models.values():
        assert len(Grid(model.layout, plan.question.world_size).groups("mp")) == model.layout.dp(
            plan.question.world_size
        )
    assert plan.question.world_size % 8 == 0 and 8 <= plan.question.world_size <= 256


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_named_after_its_model_and_command(name, plans):
    settings, folder = plans[name].question.settings, name.replace("/", "_")
    assert settings.run.dir == f"runs/{folder}" and settings.run.checkpoint_every > 0
    command = plans[name].question.command
    assert name.partition("/")[2].partition("_")[0] == command


def test_the_table_of_recipes_is_current(plans):
    written = (EXAMPLES / "README.md").read_text().partition(TABLE.MARKS[0])[2].partition(TABLE.MARKS[1])[0]
    rows = ["| " + " | ".join(TABLE.row(path, plans[name])) + " |" for name, path in RECIPES.items()]
    assert written.strip().splitlines()[2:] == rows, "run: python examples/recipes/table.py --write"


def overlay(command: str, gpu: str) -> Path:
    """The file that is laid over a recipe to compute in FP8."""
    return EXAMPLES / f"fp8/{command if command in ('ppo', 'rm') else 'policy'}_{gpu}.yaml"


def in_eight_bits(name: str, gpu: str, plans):
    question = plans[name].question
    settings = load(COMMANDS[question.command], [RECIPES[name], overlay(question.command, gpu)], [])
    kind = gpu_named({"hopper": "h100", "blackwell": "b200"}[gpu])
    memory_gib = question.memory_gib if gpu == "hopper" else kind.memory_gib
    return make_plan(replace(question, settings=settings, gpu=kind, memory_gib=memory_gib))


DENSE = [name for name in RECIPES if not name.startswith("mixtral")]
NARROW = "qwen2.5_72b"
"""Its feed-forward columns, cut 8 times, are no multiple of MXFP8's 32."""


@pytest.mark.parametrize("name", [name for name in DENSE if not name.endswith("_blackwell")])
def test_a_recipe_of_a_dense_model_fits_in_eight_bits_on_hopper_too(name, plans):
    plan = in_eight_bits(name, "hopper", plans)
    assert not plan.violations and plan.fits
    assert any("FP8 copies" in stage.working for stage in plan.stages)


@pytest.mark.parametrize("name", [name for name in DENSE if name.endswith(("/sft", "/rm", "_8b/ppo"))])
def test_a_recipe_of_a_dense_model_is_valid_on_blackwell_too(name, plans):
    plan = in_eight_bits(name, "blackwell", plans)
    assert plan.fits or (name.startswith(NARROW) and "multiple of 32" in plan.violations[0])


@pytest.mark.parametrize("path", sorted((EXAMPLES / "fp8").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_launch_of_an_fp8_file_is_that_of_a_recipe(path):
    ((command, recipe),) = re.findall(
        rf"-m megarlhf (\S+) (examples/recipes/\S+) examples/fp8/{path.name}$", path.read_text(), re.MULTILINE
    )
    assert overlay(command, path.stem.partition("_")[2]) == path and (EXAMPLES.parent / recipe).exists()


def num_parameters(config: dict) -> int:
    """From the sizes in config.json, each matrix and norm written out by hand."""
    hidden, layers, ffn = (config[name] for name in ("hidden_size", "num_hidden_layers", "intermediate_size"))
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    attention = 2 * hidden * queries + 2 * hidden * keys
    attention += (queries + 2 * keys) if config["model_type"] == "qwen2" else 0
    attention += 2 * head if config["model_type"] == "qwen3" else 0
    experts = config.get("num_local_experts", 0)
    feed_forward = 3 * hidden * ffn * max(experts, 1) + experts * hidden
    return layers * (attention + feed_forward + 2 * hidden) + 2 * config["vocab_size"] * hidden + hidden


@pytest.mark.parametrize("path", LANGUAGE_MODELS, ids=lambda path: path.stem)
def test_sizes_give_the_published_number_of_parameters(path):
    config = json.loads(path.read_text())
    assert num_parameters(config) == config["_parameters"] and not config["tie_word_embeddings"]


@pytest.mark.parametrize("path", ARCHITECTURES, ids=lambda path: path.stem)
def test_an_architecture_says_where_its_numbers_come_from_and_is_understood(path):
    config = json.loads(path.read_text())
    assert config["_source"] and not Architecture.from_hf(config, str(path)).windows


@pytest.mark.parametrize(
    "path", [path for path in ARCHITECTURES if path not in LANGUAGE_MODELS], ids=lambda path: path.stem
)
def test_a_reward_model_has_the_sizes_of_the_model_it_came_from(path):
    config = json.loads(path.read_text())
    (parent,) = [json.loads(one.read_text()) for one in LANGUAGE_MODELS if config["_source"].startswith(one.name)]
    differ = {name for name in config.keys() | parent.keys() if config.get(name) != parent.get(name)}
    assert differ == {"_source", "_parameters", "architectures", "num_labels"} and config["num_labels"] == 1
