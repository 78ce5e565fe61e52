"""RUN_DIR/status.json: how the last launch ended. torchrun turns every failure into exit code 1; this keeps ours."""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarlhf.errors import CheckpointError, ConfigError, DataError, MegarlhfError, Requeue

DONE, FAILED, BAD_INPUT, REQUEUE, INTERRUPTED = 0, 1, 2, 75, 130
"""Exit codes; 75 is what sysexits.h calls a temporary failure: start the same command again. 130 is a shell's word for
Ctrl-C."""

_log = logging.getLogger(__name__)


def exit_code(error: BaseException) -> int:
    """2 for what a user's settings or input can mend, 75 for a run to be started again, 130 for Ctrl-C, 1 for every
    other failure."""
    if isinstance(error, Requeue):
        return REQUEUE
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return BAD_INPUT if isinstance(error, ConfigError | DataError | CheckpointError) else FAILED


def reason(error: BaseException) -> str:
    """The error in words: its text, after its class where it is none of ours and the text may say too little."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, MegarlhfError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def write_status(run_dir: str | Path, code: int | None, reason: str) -> None:
    """Writes `{"code": code, "reason": reason}`; code None means running. Readers see the old or the new, no part."""
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".status.{os.getpid()}.json"
    temporary.write_text(json.dumps({"code": code, "reason": reason}, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, folder / "status.json")


def read_status(run_dir: str | Path) -> tuple[int | None, str]:
    """(code, reason) of the last launch. Raises OSError when there was none."""
    status = json.loads((Path(run_dir) / "status.json").read_text(encoding="utf-8"))
    return status["code"], status["reason"]


@contextmanager
def recorded(run_dir: str | Path, rank: int) -> Iterator[None]:
    """Keeps status.json while the block runs, and lets its errors through.

    Rank 0 writes the start and the end. Any rank writes a failure unless another did before: the first failure brings
    along those of ranks that lost their peer.
    """
    if rank == 0:
        try_write_status(run_dir, None, "running")
    try:
        yield
    except Requeue as error:
        if rank == 0:
            try_write_status(run_dir, REQUEUE, str(error))
        raise
    except BaseException as error:
        if not _has_failed(run_dir):
            try_write_status(run_dir, exit_code(error), reason(error) if rank == 0 else f"rank {rank}: {reason(error)}")
        raise
    if rank == 0:
        try_write_status(run_dir, DONE, "done")


def _has_failed(run_dir: str | Path) -> bool:
    try:
        return bool(read_status(run_dir)[0])
    except OSError:
        return False


def try_write_status(run_dir: str | Path, code: int | None, reason: str) -> None:
    """An unwritable folder must not hide the error that is being recorded."""
    try:
        write_status(run_dir, code, reason)
    except OSError as error:
        _log.warning("status.json: cannot be written in %s: %s", run_dir, error)
