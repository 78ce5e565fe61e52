import torch

from megarlhf.config.layout import Layout
from megarlhf.models.architecture import Architecture
from megarlhf.models.norm import RMSNorm
from megarlhf.models.transformer_config import transformer_config
from tests import tiny


def build(layout: Layout) -> RMSNorm:
    config = transformer_config(Architecture.from_hf(tiny.tiny_config()), layout, torch.float32)
    return RMSNorm(config, tiny.HIDDEN, eps=config.layernorm_epsilon)


def test_norm_is_the_formula_with_the_epsilon_of_the_config():
    norm = build(Layout())
    torch.manual_seed(0)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(7, 1, tiny.HIDDEN) * 1e-3  # small, so that epsilon decides
    exact = x.double()
    expected = exact / (exact.pow(2).mean(-1, keepdim=True) + tiny.NORM_EPSILON).sqrt() * norm.weight.double()
    assert torch.allclose(norm(x).double(), expected, rtol=1e-5, atol=1e-7)


def test_the_weight_is_marked_exactly_under_sequence_parallelism():
    assert build(Layout(tp=2, sp=True)).weight.sequence_parallel is True
    assert build(Layout(tp=2)).weight.sequence_parallel is False
