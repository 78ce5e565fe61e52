"""The diagnosis tells what is there, and ranks that differ are told apart."""

from pathlib import Path

from megarlhf.device.versions import code_digest
from megarlhf.loop.diagnosis import sameness
from tests.distributed.pool import run_on_ranks


def findings(rank: int, world_size: int, shared: str) -> dict[str, tuple[str, bool]]:
    from megarlhf.loop.diagnosis import launch, machine

    return {one.name: (one.value, one.is_problem) for one in (*machine(), *launch(shared))}


def test_ranks_of_one_machine_agree(tmp_path):
    one, other = run_on_ranks(2, findings, str(tmp_path / "shared"))
    assert one["ranks"] == other["ranks"] and one["ranks"][0].startswith("2 on 1 machine(s)")
    assert one["torch"][0].startswith("2.") and one["transformer-engine"][0] == "none"
    assert one["versions"] == (f"the same on all ranks, code {code_digest()}", False)
    assert one[f"folder {tmp_path}/shared"] == ("seen by all ranks", False)
    assert not list((tmp_path / "shared").iterdir())
    (probe,) = [value for name, (value, _) in one.items() if name.startswith("all-reduce")]
    assert float(probe.split()[2]) > 0
    assert not any(is_problem for _, is_problem in one.values())


def differing(rank: int, world_size: int, folder: str) -> list[tuple[str, bool]]:
    from megarlhf.loop import diagnosis

    found = diagnosis._shared_folder(Path(folder) / ("here" if rank else "there"))
    return [(found.value, found.is_problem)]


def test_ranks_that_differ_are_told_apart(tmp_path):
    for found in run_on_ranks(2, differing, str(tmp_path)):
        assert found == [("rank 1: rank 0's file cannot be read: No such file or directory", True)]
    same = {"code": "aa", "torch": "2.13"}
    (found,) = sameness([("one", same), ("two", same | {"code": "bb"})])
    assert found.is_problem and found.value.startswith("code: most ranks have aa, but rank 1 on two has bb; install")
