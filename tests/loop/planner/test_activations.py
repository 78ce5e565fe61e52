"""Activations: the planner's bytes against what autograd keeps of a real update, by torch's saved-tensor hooks."""

import pytest

from megarlhf.config.layout import Layout
from megarlhf.config.lora import LoRA
from megarlhf.engines.pipeline import plan_rows
from megarlhf.loop.planner.activations import Load, stage_activations
from megarlhf.loop.planner.models import PlannedModel
from megarlhf.loop.planner.workload import Workload
from megarlhf.parallel.grid import Grid
from megarlhf.records.experience import Experience
from megarlhf.records.spans import Spans
from tests.distributed.pool import run_on_ranks
from tests.loop.planner.measured import build, planned

ROWS, PROMPT, RESPONSE, MICRO_BATCHES = 24, 10, 22, 4
"""Six rows a micro-batch and data-parallel rank."""
BIG = {"hidden_size": 96, "intermediate_size": 200, "head_dim": 16, "num_attention_heads": 8, "num_hidden_layers": 6}
CASES = {
    "float32": (1, planned(Layout(), **BIG)),
    "bfloat16": (1, planned(Layout(), dtype="bfloat16", **BIG)),
    "value head": (1, planned(Layout(), "value", **BIG)),
    "selective": (1, planned(Layout(), recompute="selective", **BIG)),
    "full": (1, planned(Layout(), recompute="full", **BIG)),
    "full, bfloat16": (1, planned(Layout(), dtype="bfloat16", recompute="full", **BIG)),
    "normed heads": (1, planned(Layout(), family="qwen3", **BIG)),
    "adapters": (1, planned(Layout(), lora=LoRA(rank=4), **BIG)),
    "tp2": (2, planned(Layout(tp=2), **BIG)),
    "tp2 sp": (2, planned(Layout(tp=2, sp=True), dtype="bfloat16", **BIG)),
    "tp2 sp full": (2, planned(Layout(tp=2, sp=True), recompute="full", **BIG)),
    "pp2": (2, planned(Layout(pp=2), **BIG)),
    "pp2 full": (2, planned(Layout(pp=2), recompute="full", **BIG)),
    "pp2 vp2": (2, planned(Layout(pp=2, vp=2), **BIG)),
    "experts": (1, planned(Layout(), dtype="bfloat16", family="mixtral", **BIG)),
    "experts, full": (1, planned(Layout(), family="mixtral", recompute="full", **BIG)),
    "small experts": (1, planned(Layout(), family="qwen3_moe", moe_intermediate_size=120, **BIG)),
    "experts, ep2": (2, planned(Layout(ep=2), family="mixtral", **BIG)),
    "tp4, two groups": (4, planned(Layout(tp=4), **BIG)),
}


def batch(dp: int, prompt: int, response: int, samples: int) -> Experience:
    import torch

    from megarlhf.algorithms.credit import ppo_credit
    from megarlhf.algorithms.state import ppo_state
    from megarlhf.config.settings import PPO

    rows = ROWS * dp
    ids = [[(7 * row + place) % 101 for place in range(prompt + response)] for row in range(rows)]
    found = Experience.from_completions(
        [ids[row - row % samples][:prompt] for row in range(rows)],
        [row[prompt:] for row in ids],
        [[-1.0] * response] * rows,
        row_id=range(rows),
        group=[row // samples for row in range(rows)],
        finished=[True] * rows,
    )
    numbers = found.logp_rollout
    found = found.replace(logp_start=numbers, logp_reference=numbers, value=numbers, score=torch.ones(rows))
    return ppo_credit(found, PPO(), ppo_state(PPO()))[0]


def kept_bytes(rank: int, world_size: int, model: PlannedModel, prompt=PROMPT, response=RESPONSE, samples=1) -> int:
    """The most bytes that autograd keeps on this rank during an update."""
    from tests.engines.kept import KeptBytes
    from tests.engines.test_learner import ppo_part

    learner = build(model, world_size)
    with KeptBytes(learner.model.named_parameters().values()) as kept:
        learner.accumulate([ppo_part(batch(model.layout.dp(world_size), prompt, response, samples), model.head)])
    return kept.peak


@pytest.mark.parametrize("case", CASES)
def test_kept_bytes_are_within_fifteen_percent(case):
    from dataclasses import replace

    world_size, model = CASES[case]
    length = PROMPT + RESPONSE
    model = replace(model, micro_batch_tokens=ROWS // MICRO_BATCHES * length)
    dp = model.layout.dp(world_size)
    plan = plan_rows(Spans.unshared([length] * ROWS * dp), dp, model.micro_batch_tokens)
    assert {len(rows) for rows in plan} == {MICRO_BATCHES}
    load = Load(model.micro_batch_tokens, RESPONSE * (ROWS // MICRO_BATCHES), MICRO_BATCHES, length)
    found = run_on_ranks(world_size, kept_bytes, model)
    grid = Grid(model.layout, world_size)
    for rank, measured in enumerate(found):
        stage = stage_activations(model, grid.coordinates(rank).pp, load)
        ratio = (stage.kept + stage.recomputed) / measured
        assert 1 / 1.15 <= ratio <= 1.15, f"rank {rank}: {stage} against {measured} measured"


def test_rows_that_share_a_prompt_keep_it_once_and_its_keys_for_each():
    from dataclasses import replace

    prompt, response, samples = 60, 4, 12
    model = replace(planned(Layout(), **BIG), micro_batch_tokens=prompt + samples * response)
    work = Workload(ROWS, prompt, response, ROWS // samples, samples=samples)
    load = work.update_load(model, 1)
    assert (load.tokens, load.predicted, load.micro_batches) == (108, 48, 2)
    assert load.copied == samples * (prompt + response)
    seen = sum(range(prompt)) + prompt / 2 + samples * (sum(range(prompt, prompt + response)) + response / 2)
    assert load.attended == pytest.approx(seen / load.tokens)
    (measured,) = run_on_ranks(1, kept_bytes, model, prompt, response, samples)
    assert measured <= stage_activations(model, 0, load).kept <= 1.1 * measured
    # A plan counts each row's last token too, which is not computed.
    computed = replace(load, tokens=load.tokens - samples, copied=load.copied - samples)
    assert stage_activations(model, 0, computed).kept == pytest.approx(measured, rel=0.02)


def test_prompts_are_not_taken_to_be_shared_where_they_are_not():
    from dataclasses import replace

    work = Workload(24, 60, 8, 4, samples=6)
    for model in (planned(Layout(), family="mixtral", **BIG), replace(planned(Layout(), **BIG), dropout=0.1)):
        load = work.update_load(model, 1)
        assert (load.tokens, load.copied, load.attended) == (24 * 68, 0, 34)
    model = replace(planned(Layout(), **BIG), micro_batch_tokens=100)
    assert work.update_load(model, 1).tokens == 100, "five responses fit beside a prompt"
    assert work.update_load(model, 1).micro_batches == 5
