"""When a run should stop before its end: a signal from the scheduler, or time that is running out."""

import signal
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megarlhf import device

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_MARGIN = 1.25
"""Steps and saves may take this many times the longest so far."""


@dataclass
class Stopping:
    """Asked at the end of every step, a safe place: weights, optimizer and counters belong together there."""

    limit_s: float = 0.0
    """Seconds after the start by which a checkpoint must be on the disk; 0: no limit."""
    started_s: float = field(default_factory=time.monotonic)
    received: list[str] = field(default_factory=list)
    """Names of signals that came."""
    _longest_step_s: float = 0.0
    _longest_save_s: float = 0.0
    _last_s: float = 0.0

    def listen(self) -> None:
        """From now on SIGTERM and SIGUSR1 let the step end. For the main thread of a process that is all the run's."""
        for number in _SIGNALS:
            signal.signal(number, lambda got, _: self.received.append(signal.Signals(got).name))

    def saved(self, seconds: float) -> None:
        """A checkpoint took `seconds`; the next step's time counts from now."""
        self._longest_save_s = max(self._longest_save_s, seconds)
        self._last_s = time.monotonic()

    def reason(self, group: dist.ProcessGroup) -> str:
        """Why the run should stop now, in words; empty: it should not. Collective over `group`: all ranks hear the
        same, also when only one of them got the signal."""
        now = time.monotonic()
        self._longest_step_s = max(self._longest_step_s, now - (self._last_s or now))
        self._last_s = now
        needed_s = _MARGIN * (self._longest_step_s + self._longest_save_s)
        is_late = self.limit_s > 0 and now - self.started_s + needed_s > self.limit_s
        wishes = torch.tensor([name in self.received for name in ("SIGTERM", "SIGUSR1")] + [is_late], dtype=torch.int32)
        wishes = wishes.to(device.current())
        dist.all_reduce(wishes, op=dist.ReduceOp.MAX, group=group)
        reasons = ("SIGTERM", "SIGUSR1", f"run.save_before_minutes {self.limit_s / 60:g}")
        return ", ".join(reason for reason, wished in zip(reasons, wishes.tolist(), strict=True) if wished)
