"""A recipe on more ranks: work that is shared shrinks, what every rank must do for all rows does not."""

import json
from pathlib import Path

import pytest

from megarlhf.errors import ConfigError
from megarlhf.loop.planner.command import plan_command
from megarlhf.loop.planner.gpus import GPUS, Efficiency
from megarlhf.loop.planner.step_time import HOST_TOKEN_S, Machine, Parts

ROOT = Path(__file__).parents[3]
RECIPE = "examples/recipes/llama3.1_8b/ppo.yaml"
BATCH, NEW_TOKENS = 512, 1024
"""Of the recipe, which is for 8 ranks."""


@pytest.fixture(scope="module")
def points() -> dict[tuple[int, bool], dict]:
    """By ranks and whether the batch grows."""
    from contextlib import redirect_stdout
    from io import StringIO

    out = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.chdir(ROOT)
        assert plan_command(["ppo", RECIPE, "--ranks", "8", "--scale", "8,16,128", "--json"]) == 0
    return {(point["ranks"], point["grows"]): point for point in json.loads(out.getvalue())}


def test_the_models_own_work_is_shared(points):
    own = {key: point["parts"]["compute"] for key, point in points.items()}
    assert own[16, True] == pytest.approx(own[8, True], rel=0.02)
    assert own[16, False] < 0.75 * own[8, False]
    assert own[8, True] == own[8, False]


def test_a_batch_that_grows_has_as_many_rows_a_rank(points):
    assert [points[ranks, True]["batch"] for ranks in (8, 16, 128)] == [BATCH, 2 * BATCH, 16 * BATCH]
    assert points[128, False]["batch"] == BATCH


def test_every_rank_goes_through_the_rows_of_its_shard(points):
    """As many as in the recipe, as the shards are as many times more."""
    least = BATCH * NEW_TOKENS * HOST_TOKEN_S
    for ranks in (8, 16, 128):
        assert least < points[ranks, True]["parts"]["rows"] < 1.2 * points[8, True]["parts"]["rows"] < 3 * least
        assert points[ranks, False]["parts"]["rows"] < 3 * least


def test_a_batch_in_one_piece_is_gone_through_by_everyone(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    rows = {}
    for shards in (1, 4, 64):
        words = ["ppo", RECIPE, "--ranks", "128", "--rollout.shards", str(shards)]
        assert plan_command([*words, "--scale", "128", "--json"]) == 0
        rows[shards] = json.loads(capsys.readouterr().out)[0]["parts"]["rows"]
        assert plan_command(words) == 0
        held = {
            1: "updates\n",
            4: "; in 4 shards of 32 ranks\n",
            64: "; in 32 shards of 4 ranks (rollout.shards 64: no",
        }
        assert held[shards] in capsys.readouterr().out
    assert 3.5 * rows[4] < rows[1] and rows[64] < rows[4]


def test_the_share_that_is_not_the_models_own_follows_from_the_parts(points):
    for point in points.values():
        parts = point["parts"]
        assert point["overhead"] == pytest.approx(1 - parts["compute"] / sum(parts.values()))


def test_a_ring_sends_all_but_ones_own_share():
    machine = Machine(GPUS["h100"], Efficiency(compute=1.0, memory=1.0, links=0.5), world_size=64)
    assert machine.spread_s(1e9, 1, is_far=True) == 0.0
    assert machine.spread_s(1e9, 4, is_far=False) == pytest.approx(3 * 15e-6 + 0.75e9 / (450e9 * 0.5))


def test_parts_add_up():
    both = Parts(compute=1.0, tensor=2.0) + Parts(compute=2.0, rows=1.0)
    assert both == Parts(compute=3.0, tensor=2.0, rows=1.0) and both.total == 6.0 and both.overhead == 0.5


def test_numbers_of_ranks_that_are_none_are_refused(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match="--scale 8,many: give whole numbers"):
        plan_command(["ppo", RECIPE, "--scale", "8,many"])


def test_a_layout_that_needs_more_ranks_says_so(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    recipe = "examples/recipes/llama3.1_70b/ppo.yaml"
    assert plan_command(["ppo", recipe, "--ranks", "64", "--scale", "8"]) == 1
    assert "32" in capsys.readouterr().out
