"""Numbers and texts for Weights & Biases, online or offline (files in RUN_DIR/wandb, which `wandb sync` sends later).

Nothing of the machine is sent: no environment, arguments, host statistics, code or git state; of the settings no
credentials (see `without_secrets`). A broken log never stops training.
"""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from megarlhf.telemetry.attempts import Attempts
from megarlhf.telemetry.report import Number

Mode = Literal["offline", "online"]


class WandbSink:
    """A run of the project, called like the run folder; one that is resumed goes on under its id."""

    def __init__(
        self,
        run_dir: str | Path,
        mode: Mode,
        project: str,
        config: Mapping[str, Any],
        keep_steps: int = 0,
    ) -> None:
        """`config`: the settings. `keep_steps`: steps that a resumed run has done; W&B keeps what it has of later ones,
        and passes over what is told of them again."""
        self._folder = Path(run_dir)
        self._attempt = Attempts(f"wandb in {self._folder / 'wandb'}")
        self._run: Any = None
        self._attempt(lambda: self._open(mode, project, without_secrets(config), keep_steps > 0))

    def step(self, step: int, numbers: Mapping[str, Number]) -> None:
        """Writes the numbers that are finite."""
        finite = {name: value for name, value in numbers.items() if value is not None}
        self._attempt(lambda: self._run.log(finite, step=step))

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes the texts as a table."""
        if rows:
            self._attempt(lambda: self._run.log({"samples": _table(rows)}, step=step))

    def memory(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: it is in memory.jsonl; the step's peak is among its numbers."""

    def close(self) -> None:
        """Writes out, or sends, what is queued."""
        self._attempt(self._finish)

    def _finish(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # until its process has ended, the file may not hold what was written

    def _open(self, mode: Mode, project: str, config: dict[str, Any], is_resumed: bool) -> None:
        import wandb

        (self._folder / "wandb").mkdir(parents=True, exist_ok=True)
        file = self._folder / "wandb" / "run_id"
        number = file.read_text(encoding="utf-8") if is_resumed and file.is_file() else secrets.token_hex(4)
        file.write_text(number, encoding="utf-8")
        settings = wandb.Settings(
            root_dir=str(self._folder),
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            mode=mode,
            project=project,
            id=number,
            name=self._folder.resolve().name,
            config=config,
            resume="allow" if mode == "online" else None,
            settings=settings,
        )


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without names of token files, and without user, password and query in addresses."""
    return {name: _cleaned(value) for name, value in config.items() if not name.endswith("token_file")}


def _cleaned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, list | tuple):
        return [_cleaned(one) for one in value]
    if isinstance(value, str) and "://" in value:
        parts = urlsplit(value)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return value


def _table(rows: Sequence[Mapping[str, Any]]) -> Any:
    import wandb

    names = list(dict.fromkeys(name for row in rows for name in row))
    return wandb.Table(columns=[*names], data=[[row.get(name) for name in names] for row in rows])
