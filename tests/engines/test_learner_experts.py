"""One update of a mixture of experts is the same update however ranks and micro-batches share it out."""

import pytest

from megarlhf.config.layout import Layout
from megarlhf.config.settings import Optimizer
from tests.distributed.pool import run_on_ranks
from tests.engines.layouts import assemble, frozen_batch, tensors_by_name
from tests.engines.test_learner import build_learner, ppo_part
from tests.tiny import write_llama

CASES = {
    "ep2": (2, Layout(ep=2), 4096),
    "tp2": (2, Layout(tp=2), 4096),
    "tp2+sp, ep2": (2, Layout(tp=2, sp=True, ep=2), 16),
    "pp2": (2, Layout(pp=2), 16),
    "dp2, small micro-batches": (2, Layout(), 16),
    "ep2 tp2": (4, Layout(tp=2, ep=2, sp=True), 16),
    "ep4 over tp2 dp2": (4, Layout(tp=2, ep=4), 16),
    "ep2 pp2": (4, Layout(pp=2, ep=2), 16),
    "one row a micro-batch": (1, Layout(), 1),
}
KINDS = {
    "mixtral": {"family": "mixtral"},
    "dense layers first": {"family": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [0, 1], "tied": True},
}
PAIRS = [("mixtral", case) for case in CASES] + [("dense layers first", case) for case in ("pp2", "ep2 pp2", "ep2 tp2")]


def update(rank: int, world_size: int, layout: Layout, max_tokens: int, folder: str, kind: str):
    """(metrics, gradient norm, gradient pieces, weight pieces) with a load-balancing loss."""
    head = "value" if kind == "value" else "vocabulary"
    learner = build_learner(world_size, layout, folder, head, max_tokens, Optimizer())
    learner.model.tally.balance_coef = 0.1
    parts = [ppo_part(frozen_batch(num_rows=8), head)]
    learner.accumulate(parts, complete_gradients=True)
    gradients = tensors_by_name(learner.model, lambda parameter: parameter.main_grad)
    result = learner.update(parts)
    metrics = {name: metric.result() for name, metric in result.metrics.items()}
    return metrics, result.gradient_norm, gradients, tensors_by_name(learner.model, lambda parameter: parameter)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    top = tmp_path_factory.mktemp("experts")
    return {kind: str(write_llama(top / kind, **settings)) for kind, settings in KINDS.items()}


@pytest.fixture(scope="module")
def one_process(folders):
    return {kind: run_on_ranks(1, update, Layout(), 4096, folders[kind], kind)[0] for kind in KINDS}


@pytest.mark.parametrize("kind,case", PAIRS)
def test_one_update_does_not_depend_on_the_layout(kind, case, folders, one_process):
    world_size, layout, max_tokens = CASES[case]
    ranks = run_on_ranks(world_size, update, layout, max_tokens, folders[kind], kind)
    metrics, norm, gradients, weights = one_process[kind]
    for rank in ranks:
        assert rank[0] == pytest.approx(metrics, rel=1e-5, abs=1e-7)
        assert rank[1] == pytest.approx(norm, rel=1e-5)
    for place, expected in ((2, assemble([gradients])), (3, assemble([weights]))):
        found = assemble([rank[place] for rank in ranks])
        assert found.keys() == expected.keys()
        difference = sum(float((found[name] - expected[name]).square().sum()) for name in expected) ** 0.5
        assert difference <= 1e-5 * norm, place


def test_how_tokens_were_shared_out_is_reported(one_process):
    metrics = one_process["mixtral"][0]
    assert 1 < metrics["experts/busiest_expert"] <= 4 / 2
    assert 0 <= metrics["experts/idle_experts"] < 1
    assert 0 < metrics["experts/router_entropy"] < 1.3863  # nats, of 4 experts
    assert metrics["experts/balance_loss"] >= 1


def plain_update(rank: int, world_size: int, folder: str, coef: float):
    learner = build_learner(world_size, Layout(), folder, "vocabulary", 4096, Optimizer())
    learner.model.tally.balance_coef = coef
    metrics = learner.accumulate([ppo_part(frozen_batch(num_rows=8), "vocabulary")], complete_gradients=True)
    return set(metrics), dict(_named(tensors_by_name(learner.model, lambda parameter: parameter.main_grad)))


def _named(pieces):
    return [(name, values) for name, _, values in pieces if "block_sparse_moe.gate" in name]


def test_without_a_coefficient_there_is_no_balance_loss_and_with_one_it_adds_up(folders):
    gradients = {}
    for coef in (0.0, 0.1, 0.2):
        ((names, gradients[coef]),) = run_on_ranks(1, plain_update, folders["mixtral"], coef)
        assert ("experts/balance_loss" in names) == (coef > 0)
    for name, none in gradients[0.0].items():
        one, two = gradients[0.1][name] - none, gradients[0.2][name] - none
        assert one.norm() > 1e-3 and (two - 2 * one).norm() < 1e-3 * one.norm()
