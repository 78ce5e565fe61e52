"""A profile is a help: what keeps it from being written ends no training."""

import json

import torch

from megarlhf.loop.profiling import profiled


def test_a_disk_that_takes_no_profile_is_warned_about(tmp_path, caplog):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "step_2_rank_0.trace.json.gz").symlink_to("/dev/full")
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "full", tmp_path / "file" / "profile"):
        with profiled(folder, 2, [2], rank=0):
            torch.ones(8, 8) @ torch.ones(8, 8)
    told = [record.getMessage() for record in caplog.records if record.name == "megarlhf.loop.profiling"]
    assert ["No space left" in one or "Not a directory" in one for one in told] == [True, True]
    with profiled(tmp_path / "profile", 2, [2], rank=0):
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert json.loads((tmp_path / "profile" / "step_2_rank_0.json").read_text())
