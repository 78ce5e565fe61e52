"""The planner's bytes of weights, gradients and optimizer are those of real learners, to the byte."""

import pytest

from megarlhf.config.layout import Layout
from megarlhf.config.lora import LoRA
from megarlhf.loop.planner.sizes import model_bytes
from megarlhf.parallel.grid import Grid
from tests.distributed.pool import run_on_ranks
from tests.loop.planner.measured import learner_bytes, planned

CASES = {
    "one rank": (1, planned(Layout())),
    "tied, two stages": (2, planned(Layout(pp=2), tied=True)),
    "tied, one stage, dp2": (2, planned(Layout(), tied=True)),
    "bfloat16, dp2": (2, planned(Layout(), dtype="bfloat16")),
    "bfloat16, value head, sp": (2, planned(Layout(tp=2, sp=True), "value", "bfloat16")),
    "adapters, value head, dp2": (2, planned(Layout(), "value", lora=LoRA(rank=3, targets=("q_proj", "down_proj")))),
    "biases": (2, planned(Layout(tp=2), family="qwen2")),
    "cp2": (2, planned(Layout(cp=2), dtype="bfloat16")),
    "pp2 vp2, tied": (2, planned(Layout(pp=2, vp=2), tied=True)),
    "normed heads, bfloat16, dp2": (2, planned(Layout(), dtype="bfloat16", family="qwen3")),
    "tp2 dp2, tied bfloat16": (4, planned(Layout(tp=2), dtype="bfloat16", tied=True)),
    "uneven stages, dp2": (4, planned(Layout(pp=2), dtype="bfloat16", tied=True, num_hidden_layers=3)),
    "virtual stages, uneven, tied": (
        2,
        planned(Layout(pp=2, vp=2, first_stage_layers=2), tied=True, num_hidden_layers=6),
    ),
    "experts, ep2": (2, planned(Layout(ep=2), dtype="bfloat16", family="mixtral")),
    "experts whole, value head, dp2": (2, planned(Layout(), "value", family="qwen3_moe")),
    "experts over tp2 dp2": (4, planned(Layout(tp=2, sp=True, ep=2), dtype="bfloat16", family="qwen3_moe")),
    "experts in some layers, pp2 ep2": (4, planned(Layout(pp=2, ep=2), family="qwen3_moe", mlp_only_layers=[0, 2])),
    "more tensor ranks than groups": (4, planned(Layout(tp=4), num_key_value_heads=2)),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_a_real_learner(case):
    world_size, model = CASES[case]
    grid, dp = Grid(model.layout, world_size), model.layout.dp(world_size)
    counted = [model_bytes(model, grid.coordinates(rank), dp) for rank in range(world_size)]
    found = run_on_ranks(world_size, learner_bytes, model)
    assert [(one.parameters, one.weights, one.gradients, one.optimizer) for one in counted] == found
