"""Greedy texts of every family beyond Llama are those of transformers, in a ragged batch, on one and two ranks."""

import pytest

from megarlhf import device
from megarlhf.config.layout import Layout
from megarlhf.engines.generator import Generator
from tests.distributed.pool import run_on_ranks
from tests.engines.test_generator import (
    GREEDY,
    PROMPTS,
    REQUESTS,
    build,
    greedy_by_transformers,
    load_transformers,
    tokens_of,
)
from tests.families import ON_RANKS, VARIANTS
from tests.tiny import write_llama

LAYOUTS = (Layout(tp=2), Layout(pp=2))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    top = tmp_path_factory.mktemp("families")
    return {name: write_llama(top / name, **settings) for name, settings in VARIANTS.items()}


@pytest.fixture(scope="module")
def greedy_texts(folders):
    models = {name: load_transformers(folder) for name, folder in folders.items()}
    return {name: [greedy_by_transformers(model, prompt, 12) for prompt in PROMPTS] for name, model in models.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_equals_transformers_for_a_ragged_batch(name, folders, greedy_texts):
    device.join_world()
    model = build(folders[name], Layout(), 1)
    for max_slots in (8, 3):
        assert (
            tokens_of(Generator(model, max_slots, prefill_tokens=24).generate(REQUESTS, GREEDY)) == greedy_texts[name]
        )


EXPERTS = ("mixtral", "qwen3_moe with dense layers")
EXPERT_LAYOUTS = (Layout(tp=2), Layout(tp=2, ep=2), Layout(pp=2))
CASES = [(ON_RANKS, LAYOUTS), (EXPERTS, EXPERT_LAYOUTS)]


def generate_on_rank(_rank, world_size, folders, names, layouts):
    found = {}
    for name in names:
        for layout in layouts:
            generator = Generator(build(folders[name], layout, world_size), 4)
            found[name, layout] = tokens_of(generator.generate(REQUESTS, GREEDY))
    return found


@pytest.mark.parametrize(("names", "layouts"), CASES, ids=["dense", "experts"])
def test_greedy_equals_transformers_on_two_ranks(folders, greedy_texts, names, layouts):
    for rank in run_on_ranks(2, generate_on_rank, folders, names, layouts):
        assert len(rank) == len(names) * len(layouts)
        for (name, layout), texts in rank.items():
            assert texts == greedy_texts[name], (name, layout)
