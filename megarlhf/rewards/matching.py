"""Regular expressions under a time limit, matched by another process.

Python's `re` holds the interpreter while it backtracks, which can take years, and nothing else runs then, not even what
would stop it.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence

from megarlhf.errors import RewardError

MATCH_S = 5.0
"""For one response; a sound expression takes microseconds."""
_MATCHER = """
import json, re, signal, sys
expressions, texts, limit_s = json.load(sys.stdin)
for expression, text in zip(expressions, texts):
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    print(int(re.fullmatch(expression, text, re.DOTALL) is not None), flush=True)
"""
"""SIGALRM is left to end the process: a handler written in Python would have to wait for `re` too."""


def matches(
    expressions: Sequence[str], texts: Sequence[str], ids: Sequence[object], limit_s: float = MATCH_S
) -> list[bool]:
    """Whether each expression matches its whole text (dots match newlines): one boolean each.

    Raises RewardError naming the row, by `ids`, that takes longer than `limit_s` seconds or is no expression.
    """
    told = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _MATCHER],
        input=json.dumps([list(expressions), list(texts), limit_s]),
        capture_output=True,
        text=True,
    )
    found = [line == "1" for line in told.stdout.split()]
    if len(found) == len(texts):
        return found
    row, expression = ids[len(found)], expressions[len(found)]
    why = (
        f"gives no answer in {limit_s:g} s: it backtracks almost without end on this response; write it without "
        "repeats inside repeats, such as (a+)+"
    )
    if told.returncode != -signal.SIGALRM:
        why = f"cannot be used: {told.stderr.strip().splitlines()[-1:]}"
    raise RewardError(f"row {row!r}: the regular expression {expression!r} {why}")
