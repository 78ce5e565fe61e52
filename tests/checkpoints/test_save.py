"""Writing and reading back: whole or not at all, never a foreign pickle, and readable by megarlhf's tools' reader."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarlhf.checkpoints.discovery import step_folder, whole_checkpoints
from megarlhf.checkpoints.load import Checkpoint, latest_intact
from megarlhf.checkpoints.lock import locked
from megarlhf.checkpoints.manifest import MANIFEST_NAME, Manifest, record_of
from megarlhf.checkpoints.save import Content, PendingSave
from megarlhf.checkpoints.shards import NamedBox
from megarlhf.errors import CheckpointError
from tests.distributed.pool import run_on_ranks

WHOLE = torch.arange(12, dtype=torch.float32).view(4, 3)


def save(folder: Path, step: int, group, rank: int = 0, world_size: int = 1) -> Path:
    """A tensor of four rows, shared out by rows."""
    rows = range(4 * rank // world_size, 4 * (rank + 1) // world_size)
    boxes = [NamedBox("w", ((row, row + 1), (0, 3)), WHOLE[row : row + 1].clone() + step) for row in rows]
    content = Content(boxes, {"w": (4, 3)}, {"step": step, "kl": 0.1})
    target = step_folder(folder, step)
    PendingSave(target, content, step, group, metric="", value=None).finish()
    return target


def saved_by_two(rank: int, world_size: int, folder: str) -> tuple[str, list]:
    world = dist.group.WORLD
    for step in (1, 2):
        save(Path(folder), step, world, rank, world_size)
    dist.barrier()
    if rank == 0:
        file = step_folder(Path(folder), 2) / "__1_0.distcp"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    dist.barrier()
    found, problems = latest_intact(Path(folder), world)
    return found.name, problems


def test_ranks_choose_the_same_earlier_checkpoint_when_the_latest_is_damaged(tmp_path):
    answers = run_on_ranks(2, saved_by_two, str(tmp_path))
    assert answers[0] == answers[1] and answers[0][0] == "step_1"
    assert len(answers[0][1]) == 1 and "__1_0.distcp: damaged" in answers[0][1][0]
    checkpoint = Checkpoint(step_folder(tmp_path, 1))
    assert checkpoint.state == {"step": 1, "kl": 0.1} and checkpoint.step == 1
    target = torch.zeros(2, 2)
    checkpoint.fill(target, "w", ((1, 3), (1, 3)))
    assert torch.equal(target, WHOLE[1:3, 1:3] + 1)
    read_by_torch = {"w": torch.zeros(4, 3)}
    torch.distributed.checkpoint.load(read_by_torch, checkpoint_id=str(step_folder(tmp_path, 1)), no_dist=True)
    assert torch.equal(read_by_torch["w"], WHOLE + 1), "torch reads it as its own"


def test_only_damaged_checkpoints_are_an_error_and_not_a_new_start(tmp_path, world):
    folder = save(tmp_path, 1, world)
    (folder / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="none of its checkpoints can be used; set run.overwrite"):
        latest_intact(tmp_path, world)
    assert latest_intact(tmp_path / "nothing here", world) == (None, [])


def test_a_save_that_fails_leaves_the_earlier_ones_and_nothing_of_itself(tmp_path, world):
    save(tmp_path, 1, world)
    half = [NamedBox("w", ((0, 1), (0, 3)), WHOLE[:1].clone())]
    pending = PendingSave(step_folder(tmp_path, 2), Content(half, {"w": (4, 3)}, {}), 2, world, metric="", value=None)
    with pytest.raises(CheckpointError, match="do not make up its shape"):
        pending.finish()
    assert [manifest.step for manifest in whole_checkpoints(tmp_path)[0]] == [1]
    assert {entry.name for entry in (tmp_path / "checkpoints").iterdir()} == {"step_1"}


def test_before_it_is_finished_a_save_is_no_checkpoint(tmp_path, world):
    boxes = [NamedBox("w", ((0, 4), (0, 3)), WHOLE.clone())]
    pending = PendingSave(step_folder(tmp_path, 5), Content(boxes, {"w": (4, 3)}, {}), 5, world, metric="", value=None)
    assert whole_checkpoints(tmp_path) == ([], []) and latest_intact(tmp_path, world) == (None, [])
    pending.finish()
    assert latest_intact(tmp_path, world)[0] == step_folder(tmp_path, 5)


class Malicious:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("place", [".metadata", "common.pt", "__0_0.distcp"])
def test_a_pickle_from_outside_does_nothing(tmp_path, world, place):
    """Also when whoever made it has mended sizes and checksums."""
    folder, proof = save(tmp_path, 1, world), tmp_path / "it ran"
    (folder / place).write_bytes(pickle.dumps(Malicious(proof)) + b"\0" * 4096)
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    names = [entry["name"] for entry in manifest["files"]]
    (folder / MANIFEST_NAME).write_text(Manifest(1, tuple(record_of(folder / name) for name in names)).to_json())
    if place == "common.pt":
        Checkpoint(folder).fill(torch.zeros(4, 3), "w", ((0, 4), (0, 3)))  # it is there for megatron-core, not for us
    else:
        with pytest.raises(CheckpointError, match="asks for posix.system|damaged|ends at byte"):
            Checkpoint(folder).fill(torch.zeros(4, 3), "w", ((0, 4), (0, 3)))
    assert not proof.exists()


def test_other_tensors_are_named(tmp_path, world):
    checkpoint = Checkpoint(save(tmp_path, 1, world))
    with pytest.raises(CheckpointError, match=r"w: \[4, 3\] there, \[4, 5\] here"):
        checkpoint.require_shapes({"w": (4, 5)})
    with pytest.raises(CheckpointError, match=r"v: nothing there, \[2\] here"):
        checkpoint.require_shapes({"w": (4, 3), "v": (2,)})


def test_a_run_folder_has_one_writer(tmp_path, world):
    with locked(tmp_path, world):
        with pytest.raises(CheckpointError, match=f"is being written by another run .process {os.getpid()} on "):
            with locked(tmp_path, world):
                raise AssertionError("both hold the lock")
    with locked(tmp_path, world):
        pass
