"""Names for stretches of time, seen by a profiler when one runs; otherwise they cost about a microsecond each."""

from torch.profiler import record_function

PREFIX = "megarlhf::"
"""Before every name, which tells them from torch's operations."""

_STRETCHES = {"forward-compute": "forward", "backward-compute": "backward"}
_OUTERMOST = "forward-backward"


def labelled(name: str) -> record_function:
    """What happens inside the block (or the function that this decorates) has this name in a trace."""
    return record_function(PREFIX + name)


class Stretch:
    """One of megatron-core's timers: started and stopped, one inside another."""

    def __init__(self, name: str):
        self._name = name
        self._open: list[record_function] = []

    def start(self, barrier: bool = False) -> None:
        """Begins; ranks never wait for each other here."""
        self._open.append(labelled(self._name))
        self._open[-1].__enter__()

    def stop(self, barrier: bool = False) -> None:
        """Ends what began last."""
        self._open.pop().__exit__(None, None, None)


class Timers:
    """megatron-core's `config.timers`: its forward and backward passes, sums and messages become labels.

    The whole pass, which the others are parts of, is none.
    """

    def __init__(self) -> None:
        self._stretches: dict[str, Stretch] = {}

    def __call__(self, name: str, log_level: int = 0) -> Stretch:
        if name not in self._stretches:
            self._stretches[name] = Stretch("pass" if name == _OUTERMOST else _STRETCHES.get(name, "communicate"))
        return self._stretches[name]
