"""Numbers reach every sink; a broken one does not stop the run, and what is not finite never becomes text in JSON."""

import io
import json
import logging
import math
import struct

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarlhf.telemetry.console import ConsoleSink, JsonConsoleSink
from megarlhf.telemetry.jsonl import JsonlSink
from megarlhf.telemetry.report import Reporter
from megarlhf.telemetry.tensorboard import TensorboardSink
from megarlhf.telemetry.weights_and_biases import WandbSink, without_secrets

ROWS = [{"prompt": "A film", "response": " [bold] é\nline", "score": 0.5, "finished": True}]


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_step_is_a_json_line_that_can_be_read_at_once(tmp_path):
    reporter = Reporter([JsonlSink(tmp_path)])
    reporter.step(1, {"objective/kl": 0.25, "episode": 8})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "objective/kl": 0.25, "episode": 8}]
    reporter.samples(1, ROWS)
    assert lines(tmp_path / "samples.jsonl") == [{"step": 1, **ROWS[0]}]
    reporter.close()


def test_a_new_sink_starts_both_files_anew(tmp_path):
    for step in (1, 2):
        with Reporter([JsonlSink(tmp_path)]) as reporter:
            reporter.step(step, {})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 2}]


def test_a_launch_that_fails_before_its_first_step_leaves_no_run_in_the_folder(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    Reporter([JsonlSink(tmp_path)]).close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null_and_warned_of_once(tmp_path, caplog, value):
    with Reporter([JsonlSink(tmp_path)]) as reporter:
        for step in (1, 2):
            reporter.step(step, {"loss/policy_avg": value, "lr/actor": 1e-6})
    assert lines(tmp_path / "metrics.jsonl")[1] == {"step": 2, "loss/policy_avg": None, "lr/actor": 1e-6}
    assert len(caplog.records) == 1 and "step 1: loss/policy_avg is" in caplog.text


def test_a_ratio_above_two_is_warned_of(tmp_path, caplog):
    with Reporter([JsonlSink(tmp_path)]) as reporter:
        reporter.step(1, {"val/ratio": 1.9})
        assert not caplog.records
        reporter.step(2, {"val/ratio": 2.1})
    assert "step 2: val/ratio is 2.1, above 2" in caplog.text


def test_a_rank_without_sinks_reports_and_warns_nothing(caplog):
    with Reporter([]) as reporter:
        reporter.step(1, {"loss/policy_avg": math.nan, "val/ratio": 5.0})
        reporter.samples(1, ROWS)
    assert not caplog.records


def test_without_a_terminal_each_step_is_one_plain_line():
    out = io.StringIO()
    sink = ConsoleSink(Console(file=out, width=40))
    sink.expect(10)
    sink.step(3, {"objective/scores": 0.51234, "objective/kl": None, "time/total_s": 2.5})
    sink.samples(3, ROWS)
    sink.close()
    first, second = out.getvalue().splitlines()
    assert first == "step 3/10  score 0.5123  kl not finite  seconds 2.5"
    assert second.strip() == "step 3, score 0.5: A film [bold] é line"


def test_on_a_terminal_a_table_of_the_last_steps_is_shown():
    out = io.StringIO()
    sink = ConsoleSink(Console(file=out, width=120, force_terminal=True), num_rows=2)
    sink.expect(10)
    for step in (1, 2, 3):
        sink.step(step, {"objective/scores": float(step)})
    sink.samples(3, ROWS)
    sink.close()
    last_frame = out.getvalue()[out.getvalue().rindex("┏") :]
    assert "3/10" in last_frame and "2/10" in last_frame and "1/10" not in last_frame
    assert "[bold] é" in last_frame
    assert "score" in last_frame and "kl" not in last_frame, "columns without a number are left out"


def test_what_happens_before_the_first_step_is_said():
    out = io.StringIO()
    with Reporter([], ConsoleSink(Console(file=out, width=40))) as reporter:
        reporter.say("loading actor models/one")
        reporter.begin(2, 3)
        reporter.step(2, {"objective/kl": 0.5})
    Reporter([]).say("a rank that reports nothing")
    assert out.getvalue() == "loading actor models/one\nstep 2 of 3 begins\nstep 2/3  kl 0.5\n"


def test_a_program_can_read_the_console(capsys):
    with Reporter([], JsonConsoleSink()) as reporter:
        reporter.say("for people")
        reporter.begin(2, 3)
        reporter.step(2, {"objective/kl": 0.25, "loss/policy_avg": math.nan})
        reporter.samples(2, ROWS)
    assert json.loads(capsys.readouterr().out) == {"step": 2, "objective/kl": 0.25, "loss/policy_avg": None}


def test_a_text_without_a_score_is_shown_as_it_is():
    out = io.StringIO()
    ConsoleSink(Console(file=out, width=40)).samples(1, [{"prompt": "A", "response": "n't"}])
    assert out.getvalue().strip() == "step 1: An't"


def test_tensorboard_holds_the_finite_numbers(tmp_path):
    with Reporter([TensorboardSink(tmp_path)]) as reporter:
        reporter.step(1, {"objective/kl": 0.25, "loss/policy_avg": math.nan})
        reporter.samples(1, [*ROWS, {"prompt": "A text", "response": "of a corpus has no score"}])
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (text,) = events.Tensors("samples/text_summary")
    assert b"(0.5)" in text.tensor_proto.string_val[0] and b"has no score**" in text.tensor_proto.string_val[0]
    assert events.Tags()["scalars"] == ["objective/kl"]
    assert events.Scalars("objective/kl")[0].step == 1 and events.Scalars("objective/kl")[0].value == 0.25


def test_curves_of_an_earlier_run_are_not_drawn_into_this_one(tmp_path):
    for _ in range(2):
        sink = TensorboardSink(tmp_path)
        sink.step(1, {"objective/scores": 0.5})
        sink.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_training_goes_on_when_tensorboard_cannot_write(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING), Reporter([TensorboardSink(tmp_path), JsonlSink(tmp_path)]) as reporter:
        for step in (1, 2):
            reporter.step(step, {"objective/kl": 0.25})
        reporter.samples(2, ROWS)
    assert len(caplog.records) == 1 and "metrics.jsonl goes on without it" in caplog.text
    assert len(lines(tmp_path / "metrics.jsonl")) == 2


def wandb_records(folder):
    """What wandb's offline file holds: after 7 bytes of header records in blocks of 32 KiB, as in LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no room for a record's head: the rest of the block is empty
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_wandb_offline_holds_numbers_texts_and_no_secret(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("MY_PASSWORD", "hunter2")
    settings = {
        "reward": {"functions": ["http://me:hunter2@host/score?key=hunter2"], "token_file": "/home/hunter2"},
        "run": {"steps": 3},
    }
    folder = tmp_path / "nice_run"
    with Reporter([WandbSink(folder, "offline", "mine", settings)]) as reporter:
        reporter.step(1, {"objective/kl": 0.25, "loss/policy_avg": math.nan})
        reporter.samples(1, ROWS)
        reporter.step(2, {"objective/kl": 0.5})
    found = list(wandb_records(folder))
    (run,) = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name) == ("mine", "nice_run")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["reward"] == {"functions": ["http://host/score"]} and config["run"] == {"steps": 3}
    rows = [record.history.item for record in found if record.WhichOneof("record_type") == "history"]
    values = [{"/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]
    assert [(row["_step"], row["objective/kl"]) for row in values] == [(1, 0.25), (2, 0.5)]
    assert "loss/policy_avg" not in values[0]
    (table,) = folder.glob("wandb/offline-run-*/files/media/table/*.json")
    assert ROWS[0]["response"] in json.loads(table.read_text())["data"][0]
    assert all(b"hunter2" not in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_resumed_run_goes_on_under_its_id_in_wandb(tmp_path, monkeypatch):
    import wandb

    asked = []
    monkeypatch.setattr(wandb, "init", lambda **arguments: asked.append(arguments))
    for keep_steps in (0, 3, 0):
        WandbSink(tmp_path, "online", "mine", {}, keep_steps)
    ids = [arguments["id"] for arguments in asked]
    assert ids[0] == ids[1] != ids[2] and asked[1]["resume"] == "allow"


def test_training_goes_on_when_wandb_cannot_write(tmp_path, caplog):
    (tmp_path / "wandb").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING), Reporter([WandbSink(tmp_path, "offline", "mine", {})]) as reporter:
        for step in (1, 2):
            reporter.step(step, {"objective/kl": 0.25})
    assert len(caplog.records) == 1 and "metrics.jsonl goes on without it" in caplog.text


def test_addresses_lose_their_credentials():
    assert without_secrets({"url": "https://a:b@host:80/x?token=c", "path": "a@b", "list": ["http://u@h"]}) == {
        "url": "https://host:80/x",
        "path": "a@b",
        "list": ["http://h"],
    }
