"""Room for checkpoints is asked for before the first step."""

from dataclasses import replace

from megarlhf.config.runs import SFTRun
from megarlhf.config.settings import CorpusRun, Trainee
from megarlhf.loop import disk
from megarlhf.loop.roles import architectures, roles
from tests.tiny import tiny_config, tiny_shapes, write_llama


def test_a_full_disk_is_told_with_the_numbers(tmp_path, monkeypatch):
    run = CorpusRun(dir=str(tmp_path / "not/yet/there"), checkpoint_every=5, keep_checkpoints=3)
    settings = SFTRun(actor=Trainee(model=str(write_llama(tmp_path / "model"))), run=run)
    cast = roles(settings)
    models = architectures(cast, [])
    assert disk.room_violations(settings, cast, models) == []
    parameters = sum(rows * (columns[0] if columns else 1) for rows, *columns in tiny_shapes(tiny_config()).values())
    assert disk.checkpoint_bytes(cast, models) == 12 * parameters
    usage = type("Usage", (), {"free": 4 * 12 * parameters - 1})
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda place: usage)
    (sentence,) = disk.room_violations(settings, cast, models)
    assert sentence.startswith(f"run.dir: {tmp_path} has ") and "4 checkpoints (run.keep_checkpoints 3" in sentence
    silent = replace(settings, run=replace(run, checkpoint_every=0))
    assert disk.room_violations(silent, cast, models) == []
