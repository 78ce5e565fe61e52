"""The script for a GPU (tests/gpu/check.py) is itself right: every check runs here, and none can end the others."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu.check import run_checks, summary
from tests.gpu.checks import CHECKS
from tests.gpu.models import Lab

ROOT = Path(__file__).parents[2]


def check(*words: str, code: str = "") -> subprocess.CompletedProcess:
    """The script, or a line of Python, in a process of its own, in which nothing else is installed."""
    what = ["-c", code] if code else ["tests/gpu/check.py"]
    return subprocess.run([sys.executable, *what, *words], cwd=ROOT, capture_output=True, text=True, timeout=900)


def test_every_check_passes_without_a_gpu():
    done = check("--dry-run", "--budget-s", "800")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"{len(CHECKS)} of {len(CHECKS)} checks passed" in done.stdout
    for fact in ("[ok]", "choose tensorwise or delayed or blockwise or off", "learns", "while offloaded", "one step: "):
        assert fact in done.stdout
    assert "[WRONG]" not in done.stdout


def fails(lab: Lab) -> None:
    """Fails."""
    raise ValueError("on\npurpose")


def passes(lab: Lab) -> None:
    """Passes."""
    lab.require(2 > 1, "two are more than one")


def test_a_check_that_fails_does_not_end_the_others(tmp_path, capsys):
    checks = {"bad": (fails, 1.0), "good": (passes, 1.0)}
    results = list(run_checks(checks, Lab(True, tmp_path), lambda: 10.0))
    assert [(one.name, one.verdict, one.words) for one in results] == [
        ("bad", "FAIL", "ValueError: on purpose"),
        ("good", "pass", ""),
    ]
    assert summary(results, ["bad", "good"]) == 1
    assert summary(results[1:], ["good"]) == 0
    assert summary(results[1:], ["good", "never"]) == 1
    assert "FAIL never did not end" in capsys.readouterr().out


def test_a_fact_that_is_wrong_fails_its_check(tmp_path):
    with pytest.raises(AssertionError, match="one is more than two"):
        Lab(True, tmp_path).require(1 > 2, "one is more than two")


def test_no_check_begins_that_there_is_no_time_for(tmp_path):
    checks = {"long": (fails, 11.0), "short": (passes, 1.0)}
    results = list(run_checks(checks, Lab(True, tmp_path), lambda: 10.0))
    assert [one.verdict for one in results] == ["skip", "pass"]
    assert summary(results, list(checks)) == 1, "skipped is no pass"


def test_a_check_that_hangs_ends_with_what_has_passed(tmp_path):
    state = tmp_path / "results.json"
    state.write_text(json.dumps([{"name": "one", "verdict": "pass", "seconds": 1.0, "words": ""}]))
    code = "import sys, time, pathlib; from tests.gpu.check import watchdog; "
    code += f"watchdog(1, pathlib.Path({str(state)!r}), ['one', 'two']); time.sleep(60)"
    done = check(code=code)
    assert done.returncode == 1
    assert "pass one" in done.stdout and "FAIL two did not end" in done.stdout


def test_a_fresh_process_goes_on_where_the_last_one_had_to_stop(tmp_path):
    before = {"name": "environment", "verdict": "FAIL", "seconds": 1.0, "words": "a kernel failed"}
    (tmp_path / "results.json").write_text(json.dumps([before]))
    again = ("--state", str(tmp_path), "--started", str(time.time()))
    done = check("--dry-run", "--only", "environment", "refusal", *again)
    assert done.returncode == 1 and "FAIL environment (1.0 s) a kernel failed" in done.stdout
    assert "pass refusal" in done.stdout and "1 of 2 checks passed" in done.stdout


def test_without_a_gpu_it_says_so():
    done = check("--only", "refusal")
    assert done.returncode == 2 and "there is no GPU here; --dry-run checks this script" in done.stdout
