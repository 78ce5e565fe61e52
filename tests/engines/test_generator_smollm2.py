"""The real SmolLM2-135M-Instruct (made by `make quickstart`): greedy text equals transformers' in three layouts."""

from pathlib import Path

import pytest

from megarlhf import device
from megarlhf.config.layout import Layout
from megarlhf.engines.generator import Request, Sampling
from tests.distributed.pool import run_on_ranks
from tests.engines.test_generator import generate_on_rank, greedy_by_transformers, load_transformers, tokens_of

FOLDER = Path(__file__).parents[2] / "assets" / "SmolLM2-135M-Instruct"
TEXTS = (
    "The film opens with",
    "I have never seen a movie that tries so hard to be funny and fails so completely, and yet",
    "Why",
    "One of the other reviewers has mentioned that after watching just one episode",
)
NUM_NEW = 12

pytestmark = pytest.mark.skipif(not (FOLDER / "model.safetensors").exists(), reason=f"{FOLDER} is not there")


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    return [Request(tuple(tokenizer(text)["input_ids"]), row) for row, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def expected(requests) -> list[list[int]]:
    model = load_transformers(FOLDER)
    return [greedy_by_transformers(model, request.prompt_ids, NUM_NEW) for request in requests]


@pytest.mark.parametrize(
    "layout, num_ranks", [(Layout(), 1), (Layout(tp=3), 3), (Layout(), 2)], ids=["tp1", "tp3", "dp2"]
)
def test_greedy_equals_transformers(requests, expected, layout, num_ranks):
    jobs = [(requests, Sampling(temperature=0, max_new_tokens=NUM_NEW))]
    if num_ranks == 1:
        device.join_world()
        ranks = [generate_on_rank(0, 1, FOLDER, layout, jobs, 3)]
    else:
        ranks = run_on_ranks(num_ranks, generate_on_rank, FOLDER, layout, jobs, 3)
    for (found,) in ranks:
        assert tokens_of(found) == expected
