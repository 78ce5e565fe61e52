"""A run writes down what each stage held; the planner, asked before it, says the same to the byte."""

import json
from dataclasses import replace

import pytest

from megarlhf.config.layout import Layout
from megarlhf.config.residency import CriticResidency
from megarlhf.loop.planner.gpus import gpu_named
from megarlhf.loop.planner.models import cast_of
from megarlhf.loop.planner.stages import Ranks
from megarlhf.loop.planner.workload import workload_of
from tests.distributed.pool import run_on_ranks
from tests.learning.toy import train
from tests.loop.test_residency import settings, toy  # noqa: F401


@pytest.mark.parametrize("idle", ["device", "host"])
def test_tenants_of_every_stage_are_as_predicted(toy, tmp_path, idle):  # noqa: F811
    run = settings(toy, tmp_path, "2, resharded", CriticResidency(idle=idle))
    run = replace(run, critic=replace(run.critic, train=Layout(tp=2)))
    run_on_ranks(2, train, "ppo", run)
    found = [json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines()]
    measured = {row["stage"]: row["tenants"] for row in found if row["step"] == 2}
    ranks = Ranks(run, cast_of(run, tmp_path, []).models, workload_of(run), 2, gpu_named("cpu"))
    rows = [ranks.stages_of(rank) for rank in range(2)]
    for stages in zip(*rows, strict=True):
        name, expected = stages[0].name, {}
        for stage in stages:
            for tenant, size in stage.tenants.items():
                expected[str(tenant)] = expected.get(str(tenant), 0) + size
        held = {tenant: places["device"] for tenant, places in measured[name].items() if places.get("device")}
        # The longest prompt of this data set is shorter than the settings allow for, and with it the cache.
        for rough in ("generator.cache", "generator.packed"):
            assert held.pop(rough, 0) <= expected.pop(rough, 0)
        assert held == {tenant: size for tenant, size in expected.items() if size}, name
