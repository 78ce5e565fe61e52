"""A run as its folder tells it: numbers per step, sampled texts, memory per stage, settings, how it ended."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megarlhf.errors import DataError
from megarlhf.telemetry.jsonl import SHOWN_NAME


@dataclass(frozen=True)
class RunRecord:
    """One run folder, read."""

    folder: Path
    steps: Sequence[dict[str, Any]]
    """metrics.jsonl: one dict per step, with `step`; a number that was not finite is None."""
    samples: Sequence[dict[str, Any]]
    memory: Sequence[dict[str, Any]]
    shown: Sequence[dict[str, Any]]
    """before_after.jsonl: the same prompts answered before and after training, with the same noise."""
    settings: str
    """config.yaml, as it is written; empty when there is none."""
    status: dict[str, Any]
    """status.json; empty while the run goes on."""

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def names(self) -> list[str]:
        """Names of all metrics, in the order in which they first appear."""
        return list(dict.fromkeys(name for row in self.steps for name in row if name != "step"))

    def setting(self, name: str) -> Any:
        """The setting with this dotted name; None where config.yaml does not have it."""
        value = yaml.safe_load(self.settings)
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) where the metric has a number."""
        found = [(row["step"], row[name]) for row in self.steps if row.get(name) is not None]
        return [step for step, _ in found], [float(value) for _, value in found]


def read_run(folder: str | Path) -> RunRecord:
    """Reads a run folder. Raises DataError when there is none, it holds no step, or a line that is not one of ours.

    A last line that was cut off in the middle (the run goes on, or was killed) is left out.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give the folder (run.dir) of a run that has done a step")
    steps = _lines(folder / "metrics.jsonl")
    if not steps:
        raise DataError(f"{folder}: no steps in metrics.jsonl; give the folder (run.dir) of a run that has done a step")
    settings, status = folder / "config.yaml", folder / "status.json"
    return RunRecord(
        folder=folder,
        steps=steps,
        samples=_lines(folder / "samples.jsonl"),
        memory=_lines(folder / "memory.jsonl"),
        shown=_lines(folder / SHOWN_NAME),
        settings=settings.read_text(encoding="utf-8") if settings.is_file() else "",
        status=json.loads(status.read_text(encoding="utf-8")) if status.is_file() else {},
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    is_cut_off = lines[-1] != ""
    found = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError as problem:
            raise DataError(f"{path}:{number}: not JSON ({problem}); remove the line") from problem
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise DataError(f"{path}:{number}: no object with a whole number under step; remove the line")
        found.append(row)
    if is_cut_off:
        try:
            found.append(json.loads(lines[-1]))
        except ValueError:
            return found
    return found
