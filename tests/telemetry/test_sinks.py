"""Numbers reach every sink; a broken one does not stop the run, and what is not finite never becomes text in JSON."""

import io
import json
import logging
import math

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarlhf.telemetry.console import ConsoleSink, JsonConsoleSink
from megarlhf.telemetry.jsonl import JsonlSink
from megarlhf.telemetry.report import Reporter
from megarlhf.telemetry.tensorboard import TensorboardSink

ROWS = [{"prompt": "A film", "response": "[bold] é\nline", "score": 0.5, "finished": True}]


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
    sink = ConsoleSink(num_steps=10, console=Console(file=out, width=40))
    sink.step(3, {"objective/scores": 0.51234, "objective/kl": None, "time/total_s": 2.5})
    sink.samples(3, ROWS)
    sink.close()
    first, second = out.getvalue().splitlines()
    assert first == "step 3/10  score 0.5123  kl not finite  seconds 2.5"
    assert second.strip() == "step 3, score 0.5: A film [bold] é line"


def test_on_a_terminal_a_table_of_the_last_steps_is_shown():
    out = io.StringIO()
    sink = ConsoleSink(num_steps=10, console=Console(file=out, width=120, force_terminal=True), num_rows=2)
    for step in (1, 2, 3):
        sink.step(step, {"objective/scores": float(step)})
    sink.samples(3, ROWS)
    sink.close()
    last_frame = out.getvalue()[out.getvalue().rindex("┏") :]
    assert "3/10" in last_frame and "2/10" in last_frame and "1/10" not in last_frame
    assert "[bold] é" in last_frame
    assert "score" in last_frame and "kl" not in last_frame, "columns without a number are left out"


def test_a_program_can_read_the_console(capsys):
    with Reporter([JsonConsoleSink()]) as reporter:
        reporter.step(2, {"objective/kl": 0.25, "loss/policy_avg": math.nan})
        reporter.samples(2, ROWS)
    assert json.loads(capsys.readouterr().out) == {"step": 2, "objective/kl": 0.25, "loss/policy_avg": None}


def test_a_text_without_a_score_is_shown_as_it_is():
    out = io.StringIO()
    ConsoleSink(num_steps=None, console=Console(file=out, width=40)).samples(1, [{"prompt": "A", "response": "film"}])
    assert out.getvalue().strip() == "step 1: A film"


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
