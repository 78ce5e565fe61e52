"""Errors a person at the terminal can act on: what was set, what was found, what is accepted, what to do next.

Everything a user can fix derives from `MegarlhfError`; the command line turns it into exit code 2 (settings, layout or
input) or 1 (the run failed). Each class also derives from the standard error that it refines, so that library users
can catch it either way.
"""

from collections.abc import Sequence


class MegarlhfError(Exception):
    """Root of every error that megarlhf raises on purpose."""


class ConfigError(MegarlhfError, ValueError):
    """One or more settings are wrong. `violations` holds one sentence for each, all found in one pass."""

    def __init__(self, violations: str | Sequence[str]):
        self.violations: tuple[str, ...] = (violations,) if isinstance(violations, str) else tuple(violations)
        super().__init__("\n".join(self.violations))


class LayoutError(ConfigError):
    """A parallel layout does not fit the world size or the model."""


class DataError(MegarlhfError, ValueError):
    """An input file or row cannot be used as it is."""


class CheckpointError(MegarlhfError, ValueError):
    """A model folder or checkpoint is incomplete, of another shape, or not what its config says."""


class ConversionError(MegarlhfError, RuntimeError):
    """A conversion of checkpoints could not be finished, though its input is sound."""


class RewardError(MegarlhfError, RuntimeError):
    """A reward function raised, timed out, or returned something that is not one number per response."""


class RemoteError(MegarlhfError, ConnectionError):
    """A server could not be reached, refused the request, or answered with something that is not what was asked."""


class PeerError(MegarlhfError, ConnectionError):
    """Another rank is gone or failed, so this one cannot go on; the text says which and where."""


class Requeue(MegarlhfError):
    """The run was asked to stop and has saved its state: the same command, started again, goes on from there."""


class TrainingError(MegarlhfError, RuntimeError):
    """The run cannot go on: for example several non-finite updates in a row."""


class ResidencyError(MegarlhfError, RuntimeError):
    """Something is not where a stage needs it: not on the device, there twice, or more than the budget holds."""
