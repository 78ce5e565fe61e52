"""The run on the terminal: a live table of the last steps, or one plain line per step where there is no terminal."""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megarlhf.telemetry.report import Number

COLUMNS = {
    "score": "objective/scores",
    "no signal": "objective/groups_without_signal",
    "kl": "objective/kl",
    "entropy": "objective/entropy",
    "clipped": "policy/clipfrac_avg",
    "policy loss": "loss/policy_avg",
    "value loss": "loss/value_avg",
    "sft loss": "loss/sft_avg",
    "dpo loss": "loss/dpo_avg",
    "kto loss": "loss/kto_avg",
    "reward loss": "loss/reward_avg",
    "accuracy": "rewards/accuracy",
    "margin": "rewards/margin",
    "logp gap": "rollout/logp_gap_max",
    "seconds": "time/total_s",
}
"""Heading of each column and the metric below it; a run shows those that it has."""


class JsonConsoleSink:
    """The numbers of each step as a JSON line on standard output, for a program to read."""

    def step(self, step: int, numbers: Mapping[str, Number]) -> None:
        """Prints `{"step": step, ...}`; None is null."""
        print(json.dumps({"step": step, **numbers}, allow_nan=False), flush=True)

    def say(self, text: str) -> None:
        """Nothing: a program reads."""

    def expect(self, num_steps: int) -> None:
        """Nothing: steps are counted from 1."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: texts are in samples.jsonl."""

    def memory(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: it is in memory.jsonl."""

    def close(self) -> None:
        """Nothing is open."""


class ConsoleSink:
    """Shows the metrics of COLUMNS for the last steps and one sampled text."""

    def __init__(self, console: Console | None = None, num_rows: int = 12) -> None:
        self._console = console or Console()
        self._num_steps: int | None = None
        self._rows: deque[list[str]] = deque(maxlen=num_rows)
        self._sample = Text("")
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None

    def step(self, step: int, numbers: Mapping[str, Number]) -> None:
        """Adds a row, or prints a line."""
        cells = [_cell(numbers, metric) for metric in COLUMNS.values()]
        count = str(step) if self._num_steps is None else f"{step}/{self._num_steps}"
        self._rows.append([count, *cells])
        if self._live:
            self._refresh(self._live)
        else:
            shown = [f"{name} {cell}" for name, cell in zip(COLUMNS, cells, strict=True) if cell]
            self._print("  ".join([f"step {count}", *shown]))

    def say(self, text: str) -> None:
        """A line of its own."""
        self._print(text)

    def expect(self, num_steps: int) -> None:
        """How many steps there will be."""
        self._num_steps = num_steps

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Shows the first text, the response where its prompt ends."""
        if not rows:
            return
        score = f", score {rows[0]['score']:.3g}" if "score" in rows[0] else ""
        self._sample = Text(f"step {step}{score}: {rows[0]['prompt']}", style="dim")
        self._sample.append(rows[0]["response"], style="not dim")
        if self._live:
            self._refresh(self._live)
        else:
            self._print("    " + self._sample.plain.replace("\n", " "))

    def memory(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: a table is printed when the run ends."""

    def close(self) -> None:
        """Leaves the table as it is on the terminal."""
        if self._live:
            self._live.stop()

    def _refresh(self, live: Live) -> None:
        live.start()
        headings = ["step", *COLUMNS]
        used = [column for column in range(len(headings)) if any(row[column] for row in self._rows)]
        table = Table(*(headings[column] for column in used))
        for row in self._rows:
            table.add_row(*(row[column] for column in used))
        live.update(Group(table, self._sample), refresh=True)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _cell(numbers: Mapping[str, Number], metric: str) -> str:
    if metric not in numbers:
        return ""
    value = numbers[metric]
    return "not finite" if value is None else f"{value:.4g}"
