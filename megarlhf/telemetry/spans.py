"""Seconds per named stage: `with spans("generate"): ...` becomes the metric `time/generate_s`."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Spans:
    """Adds up the wall time of blocks by name until `take`. Blocks may nest; each counts all of its own time."""

    def __init__(
        self,
        synchronize: Callable[[], None] = lambda: None,
        label: Callable[[str], AbstractContextManager] = lambda name: nullcontext(),
    ) -> None:
        """`synchronize` waits for the device's queued work, which otherwise would be counted in a later block; `label`
        tells a profiler of a block."""
        self._synchronize, self._label = synchronize, label
        self._seconds: dict[str, float] = defaultdict(float)
        self._open: list[tuple[str, float]] = [("between stages", time.perf_counter())]

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Counts the time of the block under `name`, also when it raises."""
        start = time.perf_counter()
        self._open.append((name, start))
        try:
            with self._label(name):
                yield
                self._synchronize()
        finally:
            self._open.pop()
            self._open[0] = (self._open[0][0], time.perf_counter())
            self._seconds[name] += time.perf_counter() - start

    def current(self) -> tuple[str, float]:
        """The innermost block that is running, and the seconds since it was entered. May be asked by another thread."""
        name, start = self._open[-1]
        return name, time.perf_counter() - start

    def drop(self, name: str) -> None:
        """Forgets the time of the blocks called `name`."""
        self._seconds.pop(name, None)

    def take(self) -> dict[str, float]:
        """`{"time/NAME_s": seconds}` of the blocks that ended since the last call, and starts anew."""
        taken = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken
