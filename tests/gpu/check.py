"""Checks megarlhf on one GPU in under four minutes: `python tests/gpu/check.py` in a checkout, nothing of it installed.

Prints one line per fact, then a summary; exit code 0 when every check passed. Checks do not depend on each other: one
that fails is told and the next begins, in a fresh process where the GPU was left unusable. What no time is left for is
told as skipped, which is no pass. Needs torch, transformers, megatron-core and Transformer Engine; dense layers only.

`--dry-run` runs every check without a GPU, at tiny sizes, with Transformer Engine's Python on reference kernels
(tests/transformer_engine_cpu, `make te-reference`): it tells that this script is right, nothing of a GPU.
"""

import argparse
import faulthandler
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu.checks import CHECKS, Check  # noqa: E402
from tests.gpu.models import Lab, fresh_memory  # noqa: E402

BUDGET_S = 225


@dataclass
class Result:
    """How a check ended: "pass", "FAIL" or "skip"."""

    name: str
    verdict: str
    seconds: float
    words: str = ""


def run_checks(
    checks: Mapping[str, tuple[Check, float]], lab: Lab, seconds_left: Callable[[], float]
) -> Iterator[Result]:
    """Each check's result as it ends. Nothing that a check raises gets past here."""
    for name, (check, needed_s) in checks.items():
        print(f"{name}: {' '.join((check.__doc__ or '').split())}", flush=True)
        start, verdict, words = time.monotonic(), "pass", ""
        if seconds_left() < needed_s:
            verdict, words = "skip", f"no time: {seconds_left():.0f} s left, it may take {needed_s:.0f}"
        else:
            try:
                with fresh_memory():
                    check(lab)
            except Exception as error:
                verdict, words = "FAIL", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                traceback.print_exc(limit=-6)
                traceback.clear_frames(error.__traceback__)  # or its tensors would stay
        yield Result(name, verdict, time.monotonic() - start, words)


def summary(results: Sequence[Result], wanted: Sequence[str]) -> int:
    """Prints a line per check; 0 when all that were wanted passed."""
    print("summary")
    for one in results:
        print(f"  {one.verdict:4} {one.name} ({one.seconds:.1f} s) {one.words}".rstrip())
    missing = [name for name in wanted if name not in {one.name for one in results}]
    for name in missing:
        print(f"  FAIL {name} did not end")
    passed = [one for one in results if one.verdict == "pass"]
    print(f"{len(passed)} of {len(wanted)} checks passed", flush=True)
    return 0 if len(passed) == len(wanted) else 1


def main(argv: Sequence[str]) -> int:
    """Runs the checks and prints what they find; the exit code."""
    options = parsed(argv)
    start = options.started or time.time()
    state = Path(options.state or tempfile.mkdtemp(prefix="gpu_check_"), "results.json")
    watchdog(options.budget_s + 10 - (time.time() - start), state, options.only)
    warnings.simplefilter("ignore")
    if options.dry_run:
        import tests.transformer_engine_cpu  # noqa: F401  (makes this process one with Transformer Engine)
    import torch

    from megarlhf import device

    if not options.dry_run and not torch.cuda.is_available():
        print("there is no GPU here; --dry-run checks this script without one")
        return 2
    device.prepare()
    device.join_world()
    results = [Result(**one) for one in json.loads(state.read_text())] if state.exists() else []
    todo = {name: CHECKS[name] for name in options.only if name not in {one.name for one in results}}
    for one in run_checks(todo, Lab(options.dry_run, state.parent), lambda: options.budget_s - (time.time() - start)):
        results.append(one)
        state.write_text(json.dumps([asdict(each) for each in results]))
        print(f"{one.verdict} {one.name} ({one.seconds:.1f} s) {one.words}".rstrip(), flush=True)
        if one.verdict == "FAIL" and is_unusable() and len(results) < len(options.only):
            print("the GPU is unusable in this process; going on in a fresh one", flush=True)
            again = ["--state", str(state.parent), "--started", str(start)]
            os.execv(sys.executable, [sys.executable, str(Path(__file__).resolve()), *argv, *again])
    print(f"{time.time() - start:.0f} s of {options.budget_s:.0f}")
    code = summary(results, options.only)
    shutil.rmtree(state.parent, ignore_errors=True)
    device.leave_world()
    return code


def is_unusable() -> bool:
    """A failed kernel has left the GPU's context broken."""
    from megarlhf import device

    try:
        device.synchronize()
    except Exception:
        return True
    return False


def watchdog(seconds: float, state: Path, wanted: Sequence[str]) -> None:
    """Ends the process when a check hangs, with where it was and what has passed."""

    def end() -> None:
        print("out of time; a check hangs, at", flush=True)
        faulthandler.dump_traceback()
        found = [Result(**one) for one in json.loads(state.read_text())] if state.exists() else []
        summary(found, wanted)
        os._exit(1)

    timer = threading.Timer(max(1.0, seconds), end)
    timer.daemon = True
    timer.start()


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, at tiny sizes")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), help="these checks")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all of it")
    parser.add_argument("--state", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
