"""Capsules: what is written is read, what is half written does not exist, and which ones are kept."""

import json

import pytest
import torch

from megarlhf.checkpoints.capsule import (
    Capsule,
    capsule_folder,
    capsule_steps,
    prune_capsules,
    read_capsule,
    write_capsule,
)
from megarlhf.errors import CheckpointError
from megarlhf.records.experience import Experience


def capsule(step: int, start: str = "") -> Capsule:
    scored = Experience.from_completions(
        [[5, 6], [7]],
        [[8, 9], [1]],
        [[-0.5, float("nan")], [-1.0]],
        row_id=[3, 4],
        group=[0, 1],
        finished=[True, False],
        prompts=["a", "ß"],
        responses=["b", "\u2028"],
        metadata=[{"id": 1}, {}],
    )
    credited = scored.replace(advantage=torch.ones(2, 3), mask=scored.mask & torch.tensor([[True], [False]]))
    return Capsule(step, scored, credited.replace(prompts=(), responses=(), metadata=()), {"start": start}, "run: {}\n")


def test_a_capsule_is_read_as_it_was_written(tmp_path):
    written = capsule(2)
    write_capsule(tmp_path, written)
    found = read_capsule(tmp_path, 2)
    for one, other in ((written.scored, found.scored), (written.credited, found.credited)):
        for name, value in vars(one).items():
            same = (
                torch.equal(value.nan_to_num(7), vars(other)[name].nan_to_num(7))
                if isinstance(value, torch.Tensor)
                else value == vars(other)[name]
            )
            assert same, name
    assert found.config == written.config and found.about["start"] == ""
    assert not any(path.name.startswith(".") for path in (tmp_path / "capsules").iterdir())


def test_what_is_half_written_does_not_exist_and_what_is_damaged_is_told(tmp_path):
    write_capsule(tmp_path, capsule(1))
    (tmp_path / "capsules/.step_2.partial").mkdir()
    (tmp_path / "capsules/step_3").mkdir()
    assert capsule_steps(tmp_path) == [1]
    batch = capsule_folder(tmp_path, 1) / "batch.safetensors"
    batch.write_bytes(batch.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="step_1: SafetensorError: .*the capsule is damaged"):
        read_capsule(tmp_path, 1)
    (capsule_folder(tmp_path, 1) / "capsule.json").write_text(json.dumps({"format": 1, "step": 1}))
    with pytest.raises(CheckpointError, match="damaged"):
        read_capsule(tmp_path, 1)


def test_the_latest_are_kept_for_as_long_as_they_can_be_replayed(tmp_path):
    for step, start in ((1, ""), (3, "checkpoints/step_2"), (5, "checkpoints/step_4"), (6, "/elsewhere/step_5")):
        write_capsule(tmp_path, capsule(step, start))
    prune_capsules(tmp_path, 3, [4, 2])
    assert capsule_steps(tmp_path) == [3, 5, 6]
    prune_capsules(tmp_path, 3, [4])
    assert capsule_steps(tmp_path) == [5, 6]
    (capsule_folder(tmp_path, 5) / "capsule.json").write_text("cut o")
    prune_capsules(tmp_path, 3, [4])
    assert capsule_steps(tmp_path) == [5, 6], "a damaged one ends no run"
