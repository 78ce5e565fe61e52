"""SmolLM2-135M-Instruct, the quickstart's model, where `make assets` or `make quickstart` has made it."""

from pathlib import Path

import pytest
import torch

from megarlhf.models.forward import full_logits, packed_forward
from tests.models.helpers import load, random_rows, reference_logits, stream

FOLDER = Path(__file__).parents[2] / "assets" / "SmolLM2-135M-Instruct"


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{FOLDER} is not there; make quickstart makes it")
def test_logits_of_a_trained_model_equal_transformers(alone):
    rows = random_rows((9, 30), vocab_size=49152)
    model = load(FOLDER, alone)
    with torch.no_grad():
        found = full_logits(model, packed_forward(model.chunks[0], stream(rows)))
    assert (found - reference_logits(FOLDER, rows)).abs().max() < 1e-4
