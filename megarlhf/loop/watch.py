"""When one rank dies, raises or gets stuck, every rank ends within seconds, and one report says where each was.

A thread on every rank tells a sign of life and the stage through the launcher's store, which is no part of the ranks'
collectives: it works while they hang. The first rank watches all others, the others watch the first.
"""

import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch.distributed as dist

from megarlhf.errors import PeerError
from megarlhf.telemetry.status import FAILED, exit_code, reason

BEAT_S = 1.0
SILENT_S = 20.0
"""Without a sign of life for so long, a rank is taken for dead or frozen."""
_GONE_S = 3.5
"""After a broken connection: without a sign for so long, a rank is the one that is gone."""
_COLLECT_S = 2.0
_LOST_PEER = re.compile(
    r"closed by peer|Connection reset|Connection refused|Broken pipe|Socket closed|Timed out|Timeout|"
    r"remote process exited|unhandled system error|NCCL|[Gg]loo",
)
_NAMES_RANK = re.compile(r"rank \d+(:| on )")
"""What an error begins with that says itself which rank had it."""

Stage = tuple[str, float]
"""(name, seconds in it)."""


@dataclass(frozen=True)
class Report:
    """Where a rank was when the run ended."""

    rank: int
    host: str
    stage: str
    seconds: float
    problem: str
    """What happened on this rank; empty on one that was well."""
    code: int = FAILED

    def line(self, told: str) -> str:
        """For the terminal, which has been told the text `told` before."""
        what = ": the same" if self.problem and self.problem in told else f": {self.problem}" if self.problem else ""
        return f"  rank {self.rank} on {self.host}, in stage {self.stage} for {self.seconds:.0f} s{what}"


class Watch:
    """One rank's watch over itself and its peers."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, limit_s: float, told: Callable[[int, str], None]):
        """`limit_s`: a stage that takes longer is stuck (0: no limit). `told` takes exit code and reason, once, on the
        rank that merges the reports."""
        self._store, self._rank, self._world_size = store, rank, world_size
        self._limit_s, self._told = limit_s, told
        self._stage: Callable[[], Stage] = _since("start")
        self._is_leaving = threading.Event()
        self._main = threading.main_thread().ident
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """From now on this rank watches and is watched."""
        self._beat(0)
        self._thread.start()

    def follow(self, stage: Callable[[], Stage]) -> None:
        """Asks `stage` from now on where this rank is."""
        self._stage = stage

    def stop(self) -> None:
        """The run has ended well on all ranks."""
        self._is_leaving.set()
        self._thread.join(2 * BEAT_S)

    def failed(self, error: BaseException) -> BaseException:
        """Tells the other ranks, waits for the merged report, and returns the error to raise: the one given, or
        PeerError where it only says that a connection broke because another rank is gone."""
        self._is_leaving.set()
        self._thread.join(2 * BEAT_S)
        try:
            if is_consequence(error):
                return self._explained(error)
            self._tell(reason(error), exit_code(error))
            self._end(is_raised=True)
        except (RuntimeError, OSError):  # the store went with the rank that kept it
            return PeerError("the first rank is gone, and the store with it") if is_consequence(error) else error
        return error

    def _explained(self, error: BaseException) -> BaseException:
        """The cause of a broken connection: what a peer tells, or which peer is silent."""
        deadline = time.monotonic() + _GONE_S
        before = {rank: self._sign(rank) for rank in range(self._world_size) if rank != self._rank}
        while time.monotonic() < deadline and not self._store.check(["failure"]):
            time.sleep(0.1)
            self._beat(-1)
        if not self._store.check(["failure"]):
            gone = [rank for rank, sign in before.items() if self._sign(rank) == sign]
            words = [self._describe(rank, "is gone: it was killed, or its machine lost") for rank in gone]
            self._tell("; ".join(words) or reason(error), FAILED)
        problem = json.loads(self._store.get("failure"))["problem"]
        self._end()
        return PeerError(problem)

    def _run(self) -> None:
        number = 1
        while not self._is_leaving.wait(BEAT_S):
            try:
                self._beat(number)
                number += 1
                if not self._store.check(["failure"]):
                    self._look()
                if self._store.check(["failure"]) and not self._is_leaving.is_set():
                    code = json.loads(self._store.get("failure"))["code"]
                    self._end()
                    self._exit(code)
            except (RuntimeError, OSError):
                if self._is_leaving.wait(_GONE_S):  # the main thread finds out by itself
                    return
                self._told(FAILED, "rank 0 is gone, and the store with it")
                self._exit(FAILED)

    def _look(self) -> None:
        """Tells of this rank when it is stuck, and of those that this rank watches when they are silent."""
        stage, seconds = self._stage()
        if self._limit_s and seconds > self._limit_s:
            self._tell(
                f"stage {stage} has taken {seconds:.0f} s, more than run.stage_timeout_minutes {self._limit_s / 60:g}; "
                f"it is at {self._where()}",
                FAILED,
            )
        others = range(1, self._world_size) if self._rank == 0 else [0]
        for rank in others:
            sign, now = self._sign(rank), time.monotonic()
            if sign != self._seen.get(rank, (b"", 0.0))[0]:
                self._seen[rank] = (sign, now)
            elif now - self._seen[rank][1] > SILENT_S:
                self._tell(self._describe(rank, f"has given no sign of life for {SILENT_S:.0f} s"), FAILED)

    def _beat(self, number: int) -> None:
        stage, seconds = self._stage()
        sign = json.dumps([number, socket.gethostname(), stage, round(seconds), time.time()])
        self._store.set(f"beat/{self._rank}", sign)

    def _sign(self, rank: int) -> bytes:
        key = f"beat/{rank}"
        return self._store.get(key) if self._store.check([key]) else b""

    def _describe(self, rank: int, what: str) -> str:
        sign = self._sign(rank)
        if not sign:
            return f"rank {rank} {what}"
        _, host, stage, _, _ = json.loads(sign)
        return f"rank {rank} on {host} {what}; it was in stage {stage}"

    def _tell(self, problem: str, code: int) -> None:
        """The first to tell gives the run's reason; each rank's own problem is in its report."""
        self._report(problem, code)
        if not self._store.check(["failure"]):
            head = "" if _NAMES_RANK.match(problem) else f"rank {self._rank}: "
            self._store.set("failure", json.dumps({"problem": head + problem, "code": code}))

    def _report(self, problem: str, code: int) -> None:
        report = Report(self._rank, socket.gethostname(), *self._stage(), problem, code)
        self._store.set(f"report/{self._rank}", json.dumps(asdict(report)))

    def _end(self, *, is_raised: bool = False) -> None:
        """Leaves this rank's report; the lowest rank that can merges all of them. `is_raised`: the command line will
        tell this rank's problem."""
        if not self._store.check([f"report/{self._rank}"]):
            self._report("", FAILED)
        if self._rank == 0 or not self._answers(0):
            self._merge(is_raised)
        else:
            deadline = time.monotonic() + 2 * _COLLECT_S
            while time.monotonic() < deadline and not self._store.check(["merged"]):
                time.sleep(0.1)
            self._store.set(f"read/{self._rank}", "")

    def _answers(self, rank: int) -> bool:
        deadline = time.monotonic() + _COLLECT_S
        while time.monotonic() < deadline:
            if self._store.check([f"report/{rank}"]):
                return True
            time.sleep(0.1)
        return False

    def _merge(self, is_raised: bool) -> None:
        deadline = time.monotonic() + _COLLECT_S
        missing = set(range(self._world_size))
        reports: list[Report] = []
        while missing and time.monotonic() < deadline:
            for rank in sorted(missing):
                if self._store.check([f"report/{rank}"]):
                    reports.append(Report(**json.loads(self._store.get(f"report/{rank}"))))
                    missing.discard(rank)
            time.sleep(0.05)
        failure = json.loads(self._store.get("failure"))
        lines = [report.line(failure["problem"]) for report in sorted(reports, key=lambda report: report.rank)]
        lines += [f"  {self._describe(rank, 'does not answer')}" for rank in sorted(missing)]
        # What all ranks raise alike is told by the command line, once.
        if not is_raised or missing or len({report.problem for report in reports}) > 1:
            print("\n".join([f"megarlhf: the run failed: {failure['problem']}", *lines]), file=sys.stderr, flush=True)
        self._told(failure["code"], failure["problem"])
        self._store.set("merged", "1")
        # The store may end with this rank: the others, who would take that for its death, go first.
        others = [f"read/{report.rank}" for report in reports if report.rank != self._rank]
        deadline = time.monotonic() + _COLLECT_S
        while others and time.monotonic() < deadline and not self._store.check(others):
            time.sleep(0.05)

    def _where(self) -> str:
        """File, line and function that the main thread is in."""
        frame = sys._current_frames().get(self._main)
        last = traceback.extract_stack(frame)[-1] if frame else None
        return f"{last.filename}:{last.lineno} ({last.name})" if last else "its end"

    def _exit(self, code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _since(name: str) -> Callable[[], Stage]:
    start = time.monotonic()
    return lambda: (name, time.monotonic() - start)


def is_consequence(error: BaseException) -> bool:
    """Whether an error only says that a connection to another rank broke."""
    return isinstance(error, RuntimeError) and not _is_ours(error) and bool(_LOST_PEER.search(str(error)))


def _is_ours(error: BaseException) -> bool:
    return type(error).__module__.startswith("megarlhf")
