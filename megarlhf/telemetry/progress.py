"""How far a long job is. On bytes: a bar with time left on a terminal, a line now and then where there is none; on
things that can be counted: a line now and then."""

import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_LINE_EVERY_S = 5.0
_GIB = 2**30


class CountProgress:
    """Says on `stream` (usually standard error) every few seconds how many are done; on None, nothing."""

    def __init__(self, what: str, stream: TextIO | None = None, every_s: float = _LINE_EVERY_S) -> None:
        self._what, self._stream, self._every_s = what, stream, every_s
        self._start = self._last = time.monotonic()

    def say(self, text: str) -> None:
        """A line for the person who waits."""
        if self._stream:
            print(text, file=self._stream, flush=True)

    def __call__(self, done: int, total: int) -> None:
        """So many are done."""
        now = time.monotonic()
        if now - self._last >= self._every_s:
            self._last = now
            self.say(f"{done} of {total} {self._what}, {now - self._start:.0f} s")


class ByteProgress:
    """Shows bytes done, bytes a second and seconds left on `stream` (usually standard error); on None, nothing."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream) if stream is not None else None
        self._bar: Progress | None = None
        self._total = self._done = self._before = 0
        self._start = self._last = 0.0

    def say(self, text: str) -> None:
        """A line for the person who waits."""
        if self._console:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def start(self, what: str, total_bytes: int, done_bytes: int = 0) -> None:
        """Begin a job, of which `done_bytes` are done already."""
        self._total, self._done, self._before = total_bytes, done_bytes, done_bytes
        self._start = self._last = time.monotonic()
        if self._console and self._console.is_terminal:
            columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(TextColumn("{task.description}"), *columns, console=self._console)
            self._bar.start()
            self._bar.add_task(what, total=total_bytes, completed=done_bytes)

    def advance(self, num_bytes: int) -> None:
        """`num_bytes` more are done."""
        self._done += num_bytes
        now = time.monotonic()
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif now - self._last >= _LINE_EVERY_S:
            self._last = now
            rate = (self._done - self._before) / (now - self._start)
            left = (self._total - self._done) / rate
            done, total = self._done / _GIB, self._total / _GIB
            self.say(f"{done:.1f} of {total:.1f} GiB, {rate / 2**20:.0f} MiB/s, {left:.0f} s left")

    def stop(self) -> None:
        """The job is over, done or not."""
        if self._bar:
            self._bar.stop()
            self._bar = None
