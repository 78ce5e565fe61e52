"""One place that every step's numbers and sampled texts go to; it checks them once and hands them to all sinks."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Number = float | int | None

# What is worth a word when it is passed, and the next move.
WARN_ABOVE = {
    "val/ratio": (2.0, "the policy moved far from the one that sampled; lower actor.optimizer.learning_rate or epochs"),
}

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where a run's numbers and texts go."""

    def step(self, step: int, numbers: Mapping[str, Number]) -> None:
        """Takes the numbers of a step; None stands for one that is not finite."""
        ...

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Takes sampled texts: plain values per row, with at least prompt and response."""
        ...

    def memory(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Takes what each stage of a step held in memory, with at least stage and peak_bytes."""
        ...

    def close(self) -> None:
        """Everything taken is written out."""
        ...


class Screen(Sink, Protocol):
    """The sink that a person, or a program, watches."""

    def say(self, text: str) -> None:
        """Takes a line for the person who waits."""
        ...

    def expect(self, num_steps: int) -> None:
        """Takes how many steps there will be."""
        ...


class Reporter:
    """Hands each step to the sinks. A rank that reports nothing has a reporter without sinks."""

    def __init__(self, sinks: Sequence[Sink], screen: Screen | None = None) -> None:
        """`screen` is one more sink."""
        self._screen = screen
        self._sinks = (screen, *sinks) if screen else tuple(sinks)
        self._warned: set[str] = set()

    def say(self, text: str) -> None:
        """Tells the person who waits."""
        if self._screen:
            self._screen.say(text)

    def begin(self, step: int, num_steps: int) -> None:
        """Tells that a first step begins, of so many."""
        if self._screen:
            self._screen.expect(num_steps)
            self._screen.say(f"step {step} of {num_steps} begins")

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Reports a finished step. A number that is not finite is passed on as None, with one warning per name."""
        for name, value in numbers.items():
            self._judge(step, name, value)
        checked = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        for sink in self._sinks:
            sink.step(step, checked)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Reports sampled texts of a step."""
        for sink in self._sinks:
            sink.samples(step, rows)

    def memory(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Reports the memory of a step's stages."""
        for sink in self._sinks:
            sink.memory(step, rows)

    def close(self) -> None:
        """Closes every sink."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _judge(self, step: int, name: str, value: float) -> None:
        limit, advice = WARN_ABOVE.get(name, (math.inf, ""))
        if not self._sinks or name in self._warned or (math.isfinite(value) and value <= limit):
            return
        self._warned.add(name)
        if math.isfinite(value):
            _log.warning("step %d: %s is %.4g, above %g: %s (said once)", step, name, value, limit, advice)
        else:
            _log.warning("step %d: %s is %s; it is written as null (said once)", step, name, value)
