"""Transformer Engine's linears against the emulation: the same numbers, forward and backward, alone and on two ranks.

Its kernels here and the emulation's quantisers are written apart from each other; what is compared besides is what
Transformer Engine's Python does around them: which way operands are quantised, kept, gathered and transposed.
"""

import pytest
import torch

from megarlhf.config.precision import FP8
from tests.distributed.pool import run_on_ranks
from tests.transformer_engine_cpu.stand_in import BLACKWELL, HOPPER, pretend

RECIPES = ["tensorwise e4m3", "tensorwise hybrid", "blockwise e4m3", "blockwise hybrid", "delayed hybrid"]
TOKENS, COLUMNS, ROWS = 256, 384, 512


@pytest.fixture
def on_blackwell():
    pretend(BLACKWELL)
    yield
    pretend(HOPPER)


def recipe_of(name: str):
    """Transformer Engine's recipe of a name like "blockwise hybrid"."""
    from transformer_engine.common import recipe

    kind, form = name.split()
    made = {
        "tensorwise": recipe.Float8CurrentScaling,
        "blockwise": recipe.Float8BlockScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
        "delayed": lambda fp8_format: recipe.DelayedScaling(amax_history_len=16, fp8_format=fp8_format),
    }
    return made[kind](fp8_format=getattr(recipe.Format, form.upper()))


def numbers(name: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """[y, dx, dw of each of two steps] of Transformer Engine's linear, and of the emulation."""
    import transformer_engine.pytorch as te

    from megarlhf.models.precision.emulated import State, fp8_linear

    torch.manual_seed(0)
    theirs = te.Linear(COLUMNS, ROWS, bias=False, params_dtype=dtype, device="cuda")
    ours = State(FP8(*name.split()))
    of_theirs, of_ours = [], []
    for _ in range(2):
        x, gradient = torch.randn(TOKENS // 32, 32, COLUMNS, dtype=dtype), torch.randn(TOKENS, ROWS, dtype=dtype) * 1e-2
        gradient = gradient.view(TOKENS // 32, 32, ROWS)
        one, other = (x.clone().requires_grad_() for _ in range(2))
        weight = theirs.weight.detach().clone().requires_grad_()
        theirs.zero_grad()
        with te.autocast(enabled=True, recipe=recipe_of(name)):
            y = theirs(one, is_first_microbatch=True)
        y.backward(gradient)
        of_theirs += [y.detach(), one.grad, theirs.weight.grad]
        ours.kept = None
        y = fp8_linear(other, weight, None, ours)
        y.backward(gradient)
        of_ours += [y.detach(), other.grad, weight.grad]
        if ours.histories:
            ours.histories.advance(ours.settings, None)
    return of_theirs, of_ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_linear_computes_what_the_emulation_computes(name, dtype):
    for theirs, ours in zip(*numbers(name, dtype), strict=True):
        if name.startswith("delayed"):  # its second step's scale passes through one division more
            torch.testing.assert_close(theirs, ours, rtol=1e-2, atol=1e-3)
            assert float((theirs.float() - ours.float()).norm() / ours.float().norm()) < 1e-3
        else:
            assert torch.equal(theirs, ours)


@pytest.mark.parametrize("name", ["mxfp8 e4m3", "mxfp8 hybrid", "tensorwise hybrid"])
def test_a_linear_computes_what_the_emulation_computes_on_blackwell(name, on_blackwell):
    for theirs, ours in zip(*numbers(name, torch.bfloat16), strict=True):
        assert torch.equal(theirs, ours)


def test_eight_bits_are_not_left_out():
    """The distance to bfloat16 is what E4M3 costs: 2^-4 / sqrt(3) a rounding, two operands."""
    theirs, _ = numbers("blockwise e4m3", torch.bfloat16)
    torch.manual_seed(0)
    import transformer_engine.pytorch as te

    exact = te.Linear(COLUMNS, ROWS, bias=False, params_dtype=torch.bfloat16, device="cuda")
    y = exact(torch.randn(TOKENS // 32, 32, COLUMNS, dtype=torch.bfloat16))
    assert 0.03 < float((theirs[0] - y.detach()).float().norm() / y.detach().float().norm()) < 0.045


def test_mxfp8_is_refused_on_hopper():
    import transformer_engine.pytorch as te

    entered = te.autocast(enabled=True, recipe=recipe_of("mxfp8 e4m3"))
    with pytest.raises(RuntimeError, match="10.0 or higher required for MXFP8"), entered:
        pass


@pytest.mark.parametrize("tokens", [1, 12])
def test_a_number_of_tokens_that_is_no_multiple_of_eight_is_refused(tokens):
    import transformer_engine.pytorch as te

    linear = te.Linear(COLUMNS, ROWS, bias=False, params_dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="divisible"), te.autocast(enabled=True, recipe=recipe_of("tensorwise e4m3")):
        linear(torch.randn(tokens, COLUMNS, dtype=torch.bfloat16))


def on_tensor_ranks(rank: int, world_size: int, name: str, is_column: bool, sp: bool) -> list[torch.Tensor]:
    """|theirs - ours| of y, dx, dw for megatron-core's parallel linears of a layer cut over the ranks."""
    from megatron.core import tensor_parallel
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    from megarlhf.config.layout import Layout
    from megarlhf.models.precision.emulated import Emulated
    from megarlhf.parallel.groups import build_groups

    group = build_groups(Layout(tp=world_size, sp=sp), world_size).tp
    config = linear_config(world_size, sp)
    common = {"config": config, "init_method": torch.nn.init.zeros_, "bias": False, "is_expert": False}
    if is_column:
        common |= {"gather_output": False, "skip_bias_add": False}
        kinds = (TEColumnParallelLinear, tensor_parallel.ColumnParallelLinear)
    else:
        common |= {"input_is_parallel": True, "skip_bias_add": True}
        kinds = (TERowParallelLinear, tensor_parallel.RowParallelLinear)
    theirs, ours = (kind(COLUMNS, ROWS, tp_group=group, **common) for kind in kinds)
    ours._forward_impl = Emulated(FP8(*name.split()))
    generator = torch.Generator().manual_seed(rank)
    weight = torch.randn(theirs.weight.shape, generator=generator)
    common_seed = torch.Generator().manual_seed(9)
    x, gradient = (
        torch.randn(TOKENS, 1, COLUMNS, generator=common_seed),
        torch.randn(TOKENS, 1, ROWS, generator=common_seed),
    )
    if is_column:
        x = x.chunk(world_size)[rank] if sp else x
        gradient = gradient.chunk(world_size, -1)[rank]
    else:
        x = x.chunk(world_size, -1)[rank]
        gradient = gradient.chunk(world_size)[rank] if sp else gradient
    found = []
    for module in (theirs, ours):
        module.weight.data.copy_(weight)
        given = x.clone().requires_grad_()
        with fp8_context(name, group, module is theirs):
            y, _ = module(given)
        y.backward(gradient * 1e-2)
        found.append([y.detach(), given.grad, module.weight.grad])
    return [(one - other).abs().max() / other.abs().max() for one, other in zip(*found, strict=True)]


def fp8_context(name: str, group, is_theirs: bool):
    import transformer_engine.pytorch as te

    return te.autocast(enabled=is_theirs, recipe=recipe_of(name), amax_reduction_group=group)


def linear_config(tp: int, sp: bool):
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1, hidden_size=COLUMNS, num_attention_heads=4, tensor_model_parallel_size=tp, sequence_parallel=sp,
        use_cpu_initialization=True, params_dtype=torch.float32, gradient_accumulation_fusion=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["tensorwise hybrid", "blockwise e4m3"])
@pytest.mark.parametrize(
    ("is_column", "sp"),
    [(True, True), (False, True), (True, False), (False, False)],
    ids=["column sp", "row sp", "column", "row"],
)
def test_parallel_linears_compute_what_the_emulation_computes(name, is_column, sp):
    """Sequence parallel ones too, which Transformer Engine gathers as eight-bit numbers and the emulation does not."""
    for differences in run_on_ranks(2, on_tensor_ranks, name, is_column, sp):
        assert max(differences) < 1e-5, differences
