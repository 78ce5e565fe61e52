"""Which moves a stage asks for, in which order, and what is said when there is no room."""

from megarlhf.config.algorithms import GRPO
from megarlhf.config.residency import CriticResidency, Residency, TrainedResidency
from megarlhf.config.runs import GRPORun
from megarlhf.config.settings import PPORun, Reward
from megarlhf.residency.schedule import Sharing, all_of, homes, stages
from megarlhf.residency.stages import (
    CACHE,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    Move,
    Stage,
    Tenant,
    moves,
    over_budget,
    timeline,
)

ACTOR, GENERATOR = Tenant("actor", WEIGHTS), Tenant("generator", WEIGHTS)


def ppo(residency: CriticResidency) -> PPORun:
    return PPORun(reward=Reward(model="judge"), residency=residency)


def test_on_the_way_to_sampling_optimizer_and_gradients_leave_first_and_the_cache_comes_last():
    where = homes(ppo(CriticResidency(idle="disk")))
    _, reshard, generate = timeline([Stage("learn", all_of("actor")), *stages(where, Sharing())[:2]], where)
    optimizer, gradients = Tenant("actor", OPTIMIZER), Tenant("actor", GRADIENTS)
    assert reshard.moved == (
        Move(optimizer, "device", "disk"),
        Move(gradients, "device", "gone"),
        Move(GENERATOR, "gone", "device"),
    )
    assert generate.moved[0] == Move(ACTOR, "device", "disk")
    assert generate.moved[-1] == Move(Tenant("generator", CACHE), "gone", "device")


def test_nothing_moves_where_everything_is_at_home_on_the_device():
    where = homes(ppo(CriticResidency()))
    moved = {move.tenant.model for one in timeline(stages(where, Sharing()), where) for move in one.moved}
    assert moved == {"generator"}, "the cache is made for each rollout"


def test_a_tenant_that_the_next_stage_needs_too_is_moved_once():
    where = homes(ppo(CriticResidency(idle="host")))
    moved = [move for one in timeline(stages(where, Sharing()), where) for move in one.moved]
    assert moved.count(Move(ACTOR, "host", "device")) == 3, "for resharding, for its log-probs and for its update"


def test_a_stage_without_tenants_moves_nothing():
    where = homes(ppo(CriticResidency(idle="disk")))
    assert moves(Stage("reward", ()), where | {ACTOR: "device"}, where) == []


def test_exceptions_stand_beside_the_choice_for_all():
    where = homes(ppo(CriticResidency(idle="disk", actor=TrainedResidency(weights="host"), reference="host")))
    assert where[ACTOR] == where[Tenant("reference", WEIGHTS)] == "host"
    assert where[Tenant("critic", WEIGHTS)] == where[Tenant("actor", OPTIMIZER)] == "disk"
    assert where[GENERATOR] == where[Tenant("actor", GRADIENTS)] == "gone"


def test_a_run_has_only_the_tenants_of_its_models():
    where = homes(GRPORun(residency=Residency(generator="view")))
    assert {tenant.model for tenant in where if tenant.part == WEIGHTS} == {"actor", "reference"}
    where = homes(GRPORun(algorithm=GRPO(kl_coef=0.0), residency=Residency(generator="view")))
    assert {tenant.model for tenant in where if tenant.part == WEIGHTS} == {"actor"}, "nothing is made of a reference"


def test_the_budget_names_both_stages_and_the_way_out():
    critic, other = Stage("learn_critic", all_of("critic")), Tenant("critic", WEIGHTS)
    since = dict.fromkeys(critic.tenants, "learn_critic") | {ACTOR: "logp"}
    sizes = dict.fromkeys(since, 2**30)
    assert over_budget(critic, since, sizes, 4 * 2**30) is None
    problem = over_budget(critic, since, sizes, 3 * 2**30)
    assert problem is not None and "stage learn_critic" in problem and "(there since stage logp)" in problem
    assert "4.00 GiB" in problem and "residency.device_gib 3" in problem and "residency.actor.weights" in problem
    assert over_budget(Stage("value", (other,)), {other: "value"}, sizes, 2**29)


def test_the_tables_are_read_without_torch():
    import subprocess
    import sys

    code = "import megarlhf.residency.schedule, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
