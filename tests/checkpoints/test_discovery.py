"""Which folder is a checkpoint, which is the latest, and which may go: also when the folder is full of surprises."""

import json
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarlhf.checkpoints.discovery import (
    checkpoint_at,
    found_steps,
    remove_checkpoint,
    remove_left_overs,
    step_folder,
    steps_to_keep,
    whole_checkpoints,
)
from megarlhf.checkpoints.manifest import MANIFEST_NAME, Manifest, read_manifest, record_of, require_intact
from megarlhf.errors import CheckpointError


def write(run: Path, step: int, metric: str = "", value: float | None = None) -> Path:
    """A folder that is whole, with one file of data."""
    folder = step_folder(run, step)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"data of step %d" % step)
    manifest = Manifest(step, (record_of(folder / "__0_0.distcp"),), metric, value)
    (folder / MANIFEST_NAME).write_text(manifest.to_json())
    return folder


def test_the_latest_is_the_highest_number_among_foreign_names(tmp_path):
    for step in (9, 10):
        write(tmp_path, step)
    for name in ("step_10-hf", "tmp_step_20", ".step_30.partial", "step_030", "step_-1", "step_", "Step_40"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints/notes.txt").write_text("mine")
    (tmp_path / "checkpoints/step_99").write_text("a file")
    assert found_steps(tmp_path) == [10, 9]
    assert checkpoint_at(tmp_path) == step_folder(tmp_path, 10)
    remove_left_overs(tmp_path)
    left = {entry.name for entry in (tmp_path / "checkpoints").iterdir()}
    assert ".step_30.partial" not in left and {"tmp_step_20", "step_10-hf", "notes.txt"} <= left


@pytest.mark.parametrize("damage", ["no manifest", "cut manifest", "cut file", "no file", "renamed", "empty"])
def test_a_checkpoint_that_is_not_whole_is_passed_over_and_told(tmp_path, damage):
    write(tmp_path, 1)
    folder = write(tmp_path, 2)
    if damage == "no manifest":
        (folder / MANIFEST_NAME).unlink()
    elif damage == "cut manifest":
        (folder / MANIFEST_NAME).write_text((folder / MANIFEST_NAME).read_text()[:40])
    elif damage == "cut file":
        (folder / "__0_0.distcp").write_bytes(b"data")
    elif damage == "no file":
        (folder / "__0_0.distcp").unlink()
    elif damage == "renamed":
        folder.rename(step_folder(tmp_path, 7))
    else:
        for file in folder.iterdir():
            file.unlink()
    manifests, problems = whole_checkpoints(tmp_path)
    assert [manifest.step for manifest in manifests] == [1]
    assert len(problems) == 1 and ("step_7" if damage == "renamed" else "step_2") in problems[0]


def test_a_flipped_bit_is_found_by_the_checksum_only(tmp_path):
    folder = write(tmp_path, 3)
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[4] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)
    manifest = read_manifest(folder)
    with pytest.raises(CheckpointError, match="__0_0.distcp: damaged"):
        require_intact(folder, manifest.files)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", "", "\0"])
def test_a_manifest_cannot_point_outside_its_folder(tmp_path, name):
    folder = write(tmp_path, 1)
    content = json.loads((folder / MANIFEST_NAME).read_text())
    content["files"][0]["name"] = name
    (folder / MANIFEST_NAME).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="manifest.json"):
        read_manifest(folder)


def test_the_last_and_the_best_are_kept():
    scores = {1: 0.5, 2: 0.9, 3: 0.9, 4: float("nan"), 5: 0.1, 6: None}
    found = [Manifest(step, (), "objective/scores", value) for step, value in scores.items()]
    assert steps_to_keep(found, 2, "") == {5, 6}
    assert steps_to_keep(found, 0, "") == set(scores)
    assert steps_to_keep(found, 1, "objective/scores") == {6, 3}, "of equals the latest"
    losses = [Manifest(step, (), "-loss/sft_avg", value) for step, value in {1: 2.0, 2: 1.0, 3: 3.0}.items()]
    assert steps_to_keep(losses, 1, "-loss/sft_avg") == {2, 3}
    assert steps_to_keep(losses, 1, "objective/scores") == {3}, "chosen by another metric when it was saved"


def test_removing_leaves_no_half(tmp_path):
    folder = write(tmp_path, 4)
    remove_checkpoint(folder)
    assert not list((tmp_path / "checkpoints").iterdir())


names = st.text(string.ascii_letters + string.digits + "_-. ", min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..")
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
manifests = st.fixed_dictionaries(
    {"format": st.just(1), "step": json_values, "files": json_values, "metric": json_values, "value": json_values}
)


@given(st.dictionaries(names | st.sampled_from(["step_3", "step_12"]), st.binary(max_size=60), max_size=6))
@settings(max_examples=60, deadline=None)
def test_any_folder_is_looked_through_without_an_accident(tmp_path_factory, entries):
    run = tmp_path_factory.mktemp("fuzz")
    for name, content in entries.items():
        folder = run / "checkpoints" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST_NAME).write_bytes(content)
    found, problems = whole_checkpoints(run)
    assert found == [] and len(problems) == len(found_steps(run))


@given(st.binary(max_size=80) | json_values.map(lambda v: json.dumps(v).encode()) | manifests.map(
    lambda v: json.dumps(v).encode()))  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_any_manifest_is_read_or_refused_with_its_path(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match="manifest.json|is missing"):
        read_manifest(folder)
