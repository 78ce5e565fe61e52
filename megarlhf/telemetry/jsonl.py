"""Numbers and texts as JSON lines in the run folder: the record that is always kept."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from megarlhf.telemetry.report import Number


class JsonlSink:
    """metrics.jsonl with one object per step and samples.jsonl with one per text, each line flushed when written."""

    def __init__(self, run_dir: str | Path) -> None:
        """Starts both files anew. Raises OSError when the folder cannot be written."""
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = open(folder / "metrics.jsonl", "w", encoding="utf-8")
        self._samples = open(folder / "samples.jsonl", "w", encoding="utf-8")

    def step(self, step: int, numbers: Mapping[str, Number]) -> None:
        """Writes `{"step": step, ...}`; None is null."""
        _write(self._metrics, {"step": step, **numbers})

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes `{"step": step, ...}` per row."""
        for row in rows:
            _write(self._samples, {"step": step, **row})

    def close(self) -> None:
        """Closes both files."""
        self._metrics.close()
        self._samples.close()


def _write(file: TextIO, record: Mapping[str, Any]) -> None:
    # allow_nan=False: `NaN` is not JSON, and readers in other languages stop at it.
    file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
    file.flush()
