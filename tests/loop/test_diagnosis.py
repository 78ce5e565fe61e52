"""The diagnosis tells what is there, and ranks that differ are told apart."""

from pathlib import Path

from tests.distributed.pool import run_on_ranks


def findings(rank: int, world_size: int, shared: str) -> dict[str, tuple[str, bool]]:
    from megarlhf.loop.diagnosis import launch, machine

    return {one.name: (one.value, one.is_problem) for one in (*machine(), *launch(shared))}


def test_ranks_of_one_machine_agree(tmp_path):
    one, other = run_on_ranks(2, findings, str(tmp_path / "shared"))
    assert one["ranks"] == other["ranks"] and one["ranks"][0].startswith("2 on 1 machine(s)")
    assert one["torch"][0].startswith("2.") and one["transformer-engine"][0] == "none"
    assert one["versions"] == ("the same on all ranks", False) and one["code"][0].startswith("the same on all ranks (")
    assert one[f"folder {tmp_path}/shared"] == ("seen by all ranks", False)
    assert not list((tmp_path / "shared").iterdir())
    (probe,) = [value for name, (value, _) in one.items() if name.startswith("all-reduce")]
    assert float(probe.split()[2]) > 0
    assert not any(is_problem for _, is_problem in one.values())


def differing(rank: int, world_size: int, folder: str) -> list[tuple[str, bool]]:
    from megarlhf.loop import diagnosis

    mine = Path(folder) / ("here" if rank else "there")
    found = [diagnosis._same("code", f"hash{rank}"), diagnosis._shared_folder(mine)]
    return [(one.value, one.is_problem) for one in found]


def test_ranks_that_differ_are_told_apart(tmp_path):
    for found in run_on_ranks(2, differing, str(tmp_path)):
        assert found[0] == ("differ: ranks 0: hash0; ranks 1: hash1", True)
        assert found[1] == ("rank 1: rank 0's file cannot be read: No such file or directory", True)
