"""Options are scored among the whole vocabulary, whatever the packing."""

import pytest
import torch

from megarlhf.data.questions import Choice
from megarlhf.engines.choices import ChoiceScorer
from megarlhf.loop.inference import load_model
from tests.tiny import VOCAB, write_llama

CHOICES = [Choice((5, 9, 20), (40, 41)), Choice((7,), (3, VOCAB - 1, 0)), Choice(tuple(range(2, 40)), (40, 41))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_llama(tmp_path_factory.mktemp("choices") / "tiny"))


@pytest.mark.parametrize("max_tokens", [1, 4, 4096])
def test_log_probs_are_those_of_transformers(folder, single_rank, max_tokens):
    from transformers import AutoModelForCausalLM

    found = ChoiceScorer(load_model(folder, 1, 1, "float32", 1), max_tokens).logps(CHOICES)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for choice, logps in zip(CHOICES, found, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([choice.context_ids])).logits[0, -1].log_softmax(0)
        torch.testing.assert_close(logps, expected[list(choice.option_ids)], rtol=0, atol=1e-5)


def test_nothing_to_choose_is_nothing(folder, single_rank):
    assert ChoiceScorer(load_model(folder, 1, 1, "float32", 1), 64).logps([]) == []
