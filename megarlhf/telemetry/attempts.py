"""Writing where a failure must not stop training: the first one is told, and nothing more is tried."""

import logging
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Attempts:
    """Runs writes, called one after the other, until one of them fails."""

    def __init__(self, what: str) -> None:
        """`what` cannot be written, for the warning."""
        self._what = what
        self._works = True

    def __call__(self, write: Callable[[], None]) -> None:
        """Runs `write` unless one failed before."""
        if not self._works:
            return
        try:
            write()
        except Exception as error:  # whatever the back end raises, the run is worth more than its curves
            self._works = False
            _log.warning("%s: cannot write (%s); metrics.jsonl goes on without it", self._what, error)
