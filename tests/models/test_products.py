"""A CPU's own products give the gradients of megatron-core's linears and embedding, in the learner's sums at once."""

import pytest
import torch

from megarlhf.config.layout import Layout
from megarlhf.config.lora import LoRA
from megarlhf.config.settings import Optimizer
from tests.distributed.pool import run_on_ranks
from tests.engines.layouts import frozen_batch
from tests.tiny import write_llama

CASES = {
    "tied": (1, Layout(), {"tied": True}, {}),
    "untied, bias, bfloat16": (1, Layout(), {"family": "qwen2"}, {"dtype": torch.bfloat16}),
    "value head": (1, Layout(), {"num_labels": 1}, {"head": "value"}),
    "experts, some without tokens": (1, Layout(), {"family": "mixtral", "num_local_experts": 16}, {}),
    "adapters, recomputed": (1, Layout(), {"tied": True}, {"lora": LoRA(rank=2), "recompute": "full"}),
    "tied, recomputed": (1, Layout(), {"tied": True}, {"recompute": "selective"}),
    "tied, tp2": (2, Layout(tp=2), {"tied": True}, {}),
    "tp2+sp": (2, Layout(tp=2, sp=True), {}, {}),
    "adapters, tp2+sp": (2, Layout(tp=2, sp=True), {}, {"lora": LoRA(rank=2)}),
    "tied, pp2": (2, Layout(pp=2), {"tied": True}, {}),
}


def both_gradients(rank: int, world_size: int, layout: Layout, folder: str, options: dict) -> dict:
    """By parameter, what the learner sums over two micro-batches and more: with our products, and without them."""
    from megarlhf.engines.learner import Learner
    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.models.lora import add_lora
    from megarlhf.parallel.groups import build_groups
    from tests.engines.test_learner import ppo_part

    options = {"head": "vocabulary", "dtype": torch.float32, **options}
    lora, found = options.pop("lora", None), []
    groups = build_groups(layout, world_size)
    for is_plain in (False, True):
        model = build_model(Architecture.from_folder(folder), groups, **options)
        if lora:
            add_lora(model, lora, seed=11)
            for name, parameter in model.named_parameters().items():
                if name[1].endswith("adapter.b"):  # zero at first, where A has no gradient
                    parameter.data.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(1))
        if is_plain:
            without_host_products(model)
        learner = Learner(model, Optimizer(), total_updates=1, max_tokens=40)
        learner.accumulate([ppo_part(frozen_batch(num_rows=8), options["head"])], complete_gradients=True)
        trained = {key: one for key, one in model.named_parameters().items() if one.requires_grad}
        found.append({key: one.main_grad.clone() for key, one in trained.items()})
        assert all(one.grad is None for one in trained.values())
    return {key: (found[0][key], found[1][key]) for key in found[1]}


def without_host_products(model) -> None:
    """As megatron-core builds its modules."""
    removed = [
        vars(part).pop(name)
        for chunk in model.chunks
        for part in chunk.modules()
        for name in ("_forward_impl", "forward")
        if name in vars(part)
    ]
    assert removed, "there is nothing to compare with"


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_megatron_core(case, tmp_path):
    world_size, layout, fields, options = CASES[case]
    folder = write_llama(tmp_path / "model", **fields)
    for gradients in run_on_ranks(world_size, both_gradients, layout, folder, options):
        assert any(float(ours.abs().max()) > 0 for ours, _ in gradients.values())
        for key, (ours, plain) in gradients.items():
            is_rounded = "embedding" in key[1] and "dtype" in options  # megatron-core adds a token's rows in bfloat16
            tolerance = 1e-2 if is_rounded else 1e-6
            assert float((ours - plain).abs().max()) <= tolerance * float(plain.abs().max()), key


def test_large_products_are_right_and_leave_room_for_any_order():
    from megarlhf import device

    random = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=random) for shape in ((2, 160, 500), (700, 500), (700,)))
    exact = x.double() @ weight.double().t()
    for transposed in (weight, weight.t().contiguous().t()):
        found = device.linear(x, transposed, bias) - bias
        assert float((found - exact).abs().max()) < 2e-6 * 500**0.5 * float(exact.abs().max())
    narrow = device.linear(x.bfloat16(), weight.bfloat16())
    assert narrow.dtype == torch.bfloat16 and narrow.shape == (2, 160, 700)
