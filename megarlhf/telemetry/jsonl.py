"""Numbers and texts as JSON lines in the run folder: the record that is always kept."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from megarlhf.telemetry.report import Number

SHOWN_NAME = "before_after.jsonl"
"""Texts of the same prompts before and after a run, written at its end."""


class JsonlSink:
    """metrics.jsonl with one object per step, samples.jsonl with one per text, memory.jsonl with one per stage of a
    step; each line is flushed when written.

    A file exists from its first line on: a launch that fails before its first step leaves a folder that holds no run.
    """

    def __init__(self, run_dir: str | Path, keep_steps: int = 0) -> None:
        """Keeps the first `keep_steps` steps of the files that are there: those that a resumed run has done.

        Raises OSError when the folder cannot be written.
        """
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = _Lines(folder / "metrics.jsonl", keep_steps)
        self._samples = _Lines(folder / "samples.jsonl", keep_steps)
        self._memory = _Lines(folder / "memory.jsonl", keep_steps)

    def step(self, step: int, numbers: Mapping[str, Number]) -> None:
        """Writes `{"step": step, ...}`; None is null."""
        self._metrics.write({"step": step, **numbers})

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes `{"step": step, ...}` per row."""
        for row in rows:
            self._samples.write({"step": step, **row})

    def memory(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes `{"step": step, ...}` per row."""
        for row in rows:
            self._memory.write({"step": step, **row})

    def close(self) -> None:
        """Closes the files."""
        for lines in (self._metrics, self._samples, self._memory):
            lines.close()


def _cut(path: Path, keep_steps: int) -> None:
    """Cuts a file off at its first line that is beyond `keep_steps` or no whole record."""
    with path.open("r+b") as file:
        kept = 0
        for line in file:
            if not line.endswith(b"\n") or _step_of(line) not in range(1, keep_steps + 1):
                break
            kept += len(line)
        file.truncate(kept)


def _step_of(line: bytes) -> object:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record.get("step") if isinstance(record, dict) else None


class _Lines:
    """A file of JSON lines, opened for the first one."""

    def __init__(self, path: Path, keep_steps: int) -> None:
        if keep_steps and path.exists():
            _cut(path, keep_steps)
        else:
            path.unlink(missing_ok=True)
        self._path = path
        self._file: TextIO | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            self._file = open(self._path, "a", encoding="utf-8")
        # allow_nan=False: `NaN` is not JSON, and readers in other languages stop at it.
        self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
