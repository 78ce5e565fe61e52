"""One PPO update is the same update under every layout and micro-batch size, and a bad gradient changes nothing."""

import pytest
import torch

from megarlhf.config.layout import Layout
from megarlhf.config.settings import PPO, Optimizer
from tests.distributed.pool import run_on_ranks
from tests.engines.layouts import assemble, frozen_batch, tensors_by_name
from tests.tiny import write_llama

LAYOUTS = {
    "tp2": (2, Layout(tp=2), 4096),
    "pp2": (2, Layout(pp=2), 4096),
    "tp2+sp": (2, Layout(tp=2, sp=True), 4096),
    "dp2": (2, Layout(), 4096),
    "dp4": (4, Layout(), 4096),
    "pp2 dp2": (4, Layout(pp=2), 4096),
    "tp2 pp2 sp": (4, Layout(tp=2, pp=2, sp=True), 16),
    "tp4, more than key/value groups": (4, Layout(tp=4), 4096),
    "one row a micro-batch": (1, Layout(), 1),
    "small micro-batches, pp2": (2, Layout(pp=2), 16),
    "pp2 vp2": (2, Layout(pp=2, vp=2), 16),
    "pp2, one layer first": (2, Layout(pp=2, first_stage_layers=1), 16),
    "cp2": (2, Layout(cp=2), 24),
    "tp2 cp2 sp": (4, Layout(tp=2, cp=2, sp=True), 24),
    "small micro-batches, dp2": (2, Layout(), 16),
}


CASES = [(model, case) for model in ("tied", "value") for case in LAYOUTS] + [("untied", "tp2"), ("untied", "pp2")]


def build_learner(world_size: int, layout: Layout, folder: str, head: str, max_tokens: int, optimizer: Optimizer):
    """A learner of the model in `folder` with the PPO loss of its head."""
    from megarlhf.engines.learner import Learner
    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.parallel.groups import build_groups
    from megarlhf.weights.load import load_weights

    groups = build_groups(layout, world_size)
    model = build_model(Architecture.from_folder(folder), groups, head=head, dtype=torch.float32)
    load_weights(model, folder)
    return Learner(model, optimizer, total_updates=10, max_tokens=max_tokens)


def ppo_part(batch, head: str):
    """What a PPO learner of a model with this head is updated on."""
    from megarlhf.algorithms.catalogue import PPO as ALGORITHM
    from megarlhf.engines.learner import Part
    from megarlhf.loop.objectives import objective

    return Part(batch, objective(ALGORITHM, PPO(), head))


def update(rank: int, world_size: int, layout: Layout, max_tokens: int, folder: str, head: str):
    """(loss, gradient norm, gradient pieces, weight pieces after one optimizer step)."""
    learner = build_learner(world_size, layout, folder, head, max_tokens, Optimizer())
    batch = frozen_batch(num_rows=8)
    parts = [ppo_part(batch, head)]
    metrics = learner.accumulate(parts, complete_gradients=True)
    gradients = tensors_by_name(learner.model, lambda parameter: parameter.main_grad)
    result = learner.update(parts)
    loss = result.metrics["loss/value_avg" if head == "value" else "loss/policy_avg"].result()
    assert {name: metric.result() for name, metric in metrics.items()} == pytest.approx(
        {name: metric.result() for name, metric in result.metrics.items()}
    )
    return loss, result.gradient_norm, gradients, tensors_by_name(learner.model, lambda parameter: parameter)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("learner")
    return {
        "tied": write_llama(root / "tied", tied=True),
        "untied": write_llama(root / "untied"),
        "value": write_llama(root / "value", num_labels=1),
    }


@pytest.fixture(scope="module")
def one_process(folders):
    """The update of one rank, by folder."""
    cases = {"tied": "vocabulary", "untied": "vocabulary", "value": "value"}
    return {name: run_on_ranks(1, update, Layout(), 4096, str(folders[name]), head)[0] for name, head in cases.items()}


@pytest.mark.parametrize("model,case", CASES)
def test_one_update_does_not_depend_on_the_layout(model, case, folders, one_process):
    world_size, layout, max_tokens = LAYOUTS[case]
    head = "value" if model == "value" else "vocabulary"
    ranks = run_on_ranks(world_size, update, layout, max_tokens, str(folders[model]), head)
    loss, norm, gradients, weights = one_process[model]
    assert {rank[0] for rank in ranks} == {ranks[0][0]}, "ranks report different losses"
    assert ranks[0][0] == pytest.approx(loss, rel=1e-5)
    assert ranks[0][1] == pytest.approx(norm, rel=1e-5)
    expected, found = assemble([gradients]), assemble([rank[2] for rank in ranks])
    assert expected.keys() == found.keys()
    difference = sum(float((expected[name] - found[name]).square().sum()) for name in expected) ** 0.5
    assert difference <= 1e-5 * norm
    expected, found = assemble([weights]), assemble([rank[3] for rank in ranks])
    for name, tensor in expected.items():
        assert (tensor - found[name]).norm() <= 1e-5 * tensor.norm(), name
