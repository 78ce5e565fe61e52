"""Recomputing activations changes what is kept in memory, never the gradient; also under adapters on frozen weights."""

import pytest
import torch

from megarlhf.config.layout import Layout
from megarlhf.config.lora import LoRA
from megarlhf.config.settings import Optimizer
from tests.distributed.pool import run_on_ranks
from tests.engines.kept import KeptBytes
from tests.engines.layouts import frozen_batch
from tests.tiny import write_llama

LORAS = {"whole model": LoRA(), "adapters of the feed-forward": LoRA(rank=2, targets=("gate_proj", "down_proj"))}


def gradients(rank: int, world_size: int, layout: Layout, lora: LoRA, folder: str):
    """By recomputation: the gradient of every trained parameter, and the most bytes kept for the backward pass."""
    from megarlhf.engines.learner import Learner
    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.models.lora import add_lora
    from megarlhf.parallel.groups import build_groups
    from megarlhf.weights.load import load_weights
    from tests.engines.test_learner import ppo_part

    groups, found = build_groups(layout, world_size), {}
    for recompute in ("none", "selective", "full"):
        architecture = Architecture.from_folder(folder)
        model = build_model(
            architecture, groups, head="vocabulary", dtype=torch.float32, seed=None, recompute=recompute
        )
        load_weights(model, folder)
        if lora.rank:
            add_lora(model, lora, seed=11)
        learner = Learner(model, Optimizer(), total_updates=1, max_tokens=40)
        with KeptBytes(model.named_parameters().values()) as kept:
            learner.accumulate([ppo_part(frozen_batch(num_rows=8), "vocabulary")], complete_gradients=True)
        trained = {key: one.main_grad for key, one in model.named_parameters().items() if one.requires_grad}
        found[recompute] = {key: gradient.clone() for key, gradient in trained.items()}, kept.peak
    return found


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2), Layout(tp=2, sp=True)], ids=str)
@pytest.mark.parametrize("adapters", LORAS)
def test_recomputation_changes_no_gradient(adapters, layout, tmp_path):
    # Wide: what is computed again asks for a gradient of a frozen embedding, for which the first attention is kept.
    folder = str(write_llama(tmp_path / "model", tied=True, intermediate_size=112))
    for rank in run_on_ranks(layout.model_ranks, gradients, layout, LORAS[adapters], folder):
        expected, most = rank["none"]
        assert any(gradient.abs().max() > 0 for gradient in expected.values())
        for recompute in ("selective", "full"):
            found, kept = rank[recompute]
            assert found.keys() == expected.keys()
            for key in expected:
                torch.testing.assert_close(found[key], expected[key], rtol=1e-6, atol=1e-9, msg=f"{recompute} {key}")
            assert kept < most
