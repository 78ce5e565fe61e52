"""The report of the benchmarks: targets are judged, one broken benchmark is one row, what is written can be read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import __main__ as bench
from tests.benchmarks.report import Row, read, scratch, table, write


@pytest.mark.parametrize(
    ("figure", "target", "is_met"),
    [(2.0, ">= 2.0", True), (1.9, ">= 2.0", False), (0.6, "<= 0.6", True), (0.7, "<= 0.6", False)]
    + [(3.0, "", None), (None, ">= 2.0", False), (None, "", None)],
)
def test_a_target_is_met_or_not(figure, target, is_met):
    assert Row("speed", figure, "x", target).is_met is is_met


def test_rows_are_written_and_read_back(tmp_path):
    rows = [Row("speed", 2.5, "x", ">= 2.0", "5 rounds", "python -m a", "a machine"), Row("size", None, "bytes")]
    write(rows, tmp_path / "deep" / "rows.json")
    assert read(tmp_path / "deep" / "rows.json") == rows
    assert [row["met"] for row in json.loads((tmp_path / "deep" / "rows.json").read_text())] == [True, None]
    text = table(rows)
    assert "| speed | 2.5 x | >= 2.0 | yes | 5 rounds |" in text and "`python -m a`: speed." in text


def test_a_benchmarks_folder_is_gone_when_it_ends_and_the_one_it_was_given_is_not(tmp_path):
    with pytest.raises(ZeroDivisionError), scratch(tmp_path / "room") as at:
        assert at.parent == tmp_path / "room" and at.is_dir()
        raise ZeroDivisionError
    assert list(tmp_path.rglob("*")) == [tmp_path / "room"]


def test_a_broken_benchmark_does_not_stop_the_others(tmp_path, monkeypatch):
    package = tmp_path / "some_benchmarks"
    package.mkdir()
    (package / "bad.py").write_text("raise SystemExit(3)")
    (package / "good.py").write_text(
        "import sys\nfrom pathlib import Path\nfrom tests.benchmarks.report import Row, finish\n"
        "finish([Row('speed', 1.0, 'x')], Path(sys.argv[2]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    found = bench.collect(["bad", "good"], tmp_path / "out", limit_s=60, package="some_benchmarks")
    assert [row.figure for row in found["good"]] == [1.0]
    assert found["good"][0].command == "python -m some_benchmarks.good"
    assert found["bad"][0].note.startswith("FAILED: exit code 3")
    assert len(json.loads((tmp_path / "out" / "results.json").read_text())) == 2
    assert "## bad" in (tmp_path / "out" / "results.md").read_text()


def test_an_unknown_benchmark_is_refused_with_the_names():
    words = [sys.executable, "-m", "tests.benchmarks", "no_such_benchmark"]
    answer = subprocess.run(words, capture_output=True, text=True)
    assert answer.returncode == 2 and "no benchmark no_such_benchmark" in answer.stderr and "rollout" in answer.stderr


@pytest.mark.parametrize("name", bench.names())
def test_every_benchmark_takes_a_file_for_its_rows(name):
    text = (bench.HERE / f"{name}.py").read_text()
    assert '"--json"' in text and "finish(" in text
