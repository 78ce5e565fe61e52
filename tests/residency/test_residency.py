"""Stages bring in what they name; what is elsewhere, unknown, entered twice or too much is refused, naming stages."""

import pytest
import torch

from megarlhf.errors import ResidencyError
from megarlhf.residency.accounting import merged, metrics, table
from megarlhf.residency.residency import Residency
from megarlhf.residency.stages import CACHE, OPTIMIZER, WEIGHTS, Tenant

ACTOR, CRITIC, STATE = Tenant("actor", WEIGHTS), Tenant("critic", WEIGHTS), Tenant("critic", OPTIMIZER)
MIB = 2**20


class House:
    """A residency with two linear layers and an optimizer state, of 1 MiB each."""

    def __init__(self, folder, homes, **options):
        self.residency = Residency(homes, folder, **options)
        self.modules = {name: torch.nn.Linear(512, 512, bias=False) for name in ("actor", "critic")}
        self.state = torch.zeros(512, 512)
        for name, module in self.modules.items():
            self.residency.add(Tenant(name, WEIGHTS), module.parameters)
            self.residency.guard(name, [module])
        self.residency.add(STATE, lambda: [self.state])
        self.residency.rest()

    def run(self, model: str) -> torch.Tensor:
        return self.modules[model](torch.ones(1, 512))


@pytest.fixture
def house(tmp_path) -> House:
    return House(tmp_path, {ACTOR: "disk", CRITIC: "host", STATE: "disk"})


def test_a_stage_has_what_it_names_and_the_rest_is_where_it_waits(house):
    before = {}
    for name, tenant in (("actor", ACTOR), ("critic", CRITIC)):
        with house.residency.stage(name, [tenant]):
            before[name] = house.run(name).clone()
    with house.residency.stage("both", [ACTOR, CRITIC]):
        assert all(torch.equal(house.run(name), before[name]) for name in before)
    actor, critic, both = house.residency.take()
    assert (actor.bytes_at("device"), actor.bytes_at("host"), actor.bytes_at("disk")) == (MIB, MIB, MIB)
    assert (critic.bytes_in, critic.bytes_out) == (MIB, 0), "the actor's file, from before, still says what it is"
    assert (both.bytes_in, both.bytes_out) == (MIB, 0)
    # The peak is the process's: what earlier tests leave to be freed meanwhile is taken off.
    assert both.bytes_at("device") == 2 * MIB and both.peak_bytes > 2 * MIB - MIB // 4
    assert house.residency.take() == []


def test_what_a_stage_without_the_optimizer_read_is_not_written_back(house):
    for _ in range(2):
        with house.residency.stage("actor", [ACTOR]):
            pass
        with house.residency.stage("update", [CRITIC, STATE]):
            pass
    (actor, update) = house.residency.take()
    assert actor.bytes_out == 2 * MIB, "what an update changed goes back"
    assert update.bytes_out == 0, "what was only read does not"


def test_two_stages_at_once_are_refused(house):
    with pytest.raises(ResidencyError, match="stage inner is entered inside stage outer"):
        with house.residency.stage("outer", [ACTOR]), house.residency.stage("inner", [CRITIC]):
            pass
    with house.residency.stage("afterwards", [CRITIC]):
        house.run("critic")


def test_weights_that_are_elsewhere_cannot_be_computed_with(house):
    with house.residency.stage("earlier", [ACTOR]):
        pass
    with house.residency.stage("later", [CRITIC]):
        with pytest.raises(ResidencyError, match=r"stage later uses actor.weights.*on disk.*for stage earlier"):
            house.run("actor")
    with pytest.raises(ResidencyError, match="work after stage later uses critic.optimizer"):
        house.residency.require(CRITIC, STATE)


def test_a_tenant_that_the_run_does_not_have_is_refused(house):
    with pytest.raises(ResidencyError, match=r"stage odd \(after stage building\) asks for judge.weights"):
        with house.residency.stage("odd", [Tenant("judge", WEIGHTS)]):
            pass


def budgeted(rank: int, world_size: int, folder) -> str:
    from pathlib import Path

    house = House(Path(folder), {STATE: "disk"}, budget_bytes=int(2.5 * MIB))
    cache = Tenant("generator", CACHE)
    house.residency.add_passing(cache)
    with house.residency.stage("score", [ACTOR]):
        pass
    with pytest.raises(ResidencyError) as problem:
        with house.residency.stage("update", [CRITIC, STATE]):
            raise AssertionError("the stage began")
    with pytest.raises(ResidencyError, match="stage generate: actor.weights 1.0 MiB, generator.cache 1.0 MiB beside"):
        with house.residency.stage("generate", [ACTOR, cache]):
            house.residency.note(cache, MIB)
    return str(problem.value)


def test_more_than_the_budget_is_refused_before_anything_moves(tmp_path):
    from tests.distributed.pool import run_on_ranks

    (problem,) = run_on_ranks(1, budgeted, str(tmp_path))
    assert "stage update: critic.weights 1.0 MiB, critic.optimizer 1.0 MiB beside actor.weights" in problem
    assert "(there since stage score) are 3.0 MiB on the device" in problem
    assert "residency.device_gib" in problem and "residency.actor.weights: host or disk" in problem


def test_the_table_and_the_metrics_are_of_the_fullest_moment(house):
    for tenants in ([ACTOR], [ACTOR, CRITIC]):
        with house.residency.stage("same", tenants):
            pass
    (record,) = merged(house.residency.take())
    assert record.bytes_at("device") == 2 * MIB and record.bytes_in == 2 * MIB
    assert metrics([record])["memory/moved_gib"] == 2 / 1024
    assert table([record]).splitlines()[1].split()[:3] == ["same", "2.0", "MiB"]
