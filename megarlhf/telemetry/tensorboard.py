"""Numbers as tensorboard event files. A broken log never stops training: only its first failure is told."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarlhf.telemetry.attempts import Attempts
from megarlhf.telemetry.report import Number


class TensorboardSink:
    """Scalars under the metrics' own names, in RUN_DIR/tensorboard."""

    def __init__(self, run_dir: str | Path, keep_steps: int = 0) -> None:
        """Curves of an earlier run are removed, but for the first `keep_steps` steps of one that is resumed."""
        self._keep_steps = keep_steps
        self._folder = Path(run_dir) / "tensorboard"
        self._writer: Any = None
        self._attempt = Attempts(f"tensorboard in {self._folder}")
        self._attempt(self._open)

    def step(self, step: int, numbers: Mapping[str, Number]) -> None:
        """Writes the numbers that are finite."""
        self._attempt(lambda: self._add(step, numbers))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes the texts below one another."""
        text = "\n\n---\n\n".join(_text(row) for row in rows)
        self._attempt(lambda: self._writer.add_text("samples", text, step))

    def memory(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: it is in memory.jsonl; the step's peak is among its numbers."""

    def close(self) -> None:
        """Writes out what is queued."""
        self._attempt(lambda: self._writer.close())

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if not self._keep_steps:
            shutil.rmtree(self._folder, ignore_errors=True)  # curves of an earlier run would be drawn into ours
        self._folder.mkdir(parents=True, exist_ok=True)
        # From the purged step on, tensorboard shows nothing of files that are older than this writer's.
        self._writer = SummaryWriter(str(self._folder), purge_step=self._keep_steps + 1 if self._keep_steps else None)

    def _add(self, step: int, numbers: Mapping[str, Number]) -> None:
        for name, value in numbers.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()


def _text(row: Mapping[str, Any]) -> str:
    score = f" ({row['score']:.3g})" if "score" in row else ""
    return f"{row['prompt']} **{row['response']}**{score}"
