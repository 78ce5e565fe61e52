"""What a launcher (torchrun, srun) told this process through its environment. No torch: settings are checked first."""

import os

from megarlhf.errors import ConfigError

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCH = "launch with `torchrun --nproc-per-node N -m megarlhf ...`"
"""The next move when the environment is half-set."""


def is_launched() -> bool:
    """A launcher has started this process as one of several ranks (or as the only one)."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def place() -> tuple[int, int]:
    """(rank, world size); (0, 1) without a launcher. Raises ConfigError when only a part is set, or no number."""
    if not is_launched():
        return 0, 1
    missing = [name for name in _NAMES if name not in os.environ]
    if missing:
        found = [name for name in _NAMES if name in os.environ]
        raise ConfigError(
            f"environment: {', '.join(found)} set but {', '.join(missing)} missing; {LAUNCH}, or unset RANK and "
            "WORLD_SIZE to run as a single process"
        )
    for name in ("RANK", "WORLD_SIZE"):
        if not os.environ[name].isdigit():
            raise ConfigError(f"environment: {name} is {os.environ[name]!r}, a whole number is needed; {LAUNCH}")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= world_size:
        raise ConfigError(f"environment: RANK {rank} is none of the WORLD_SIZE {world_size} ranks 0 to N-1; {LAUNCH}")
    return rank, world_size


def local_rank() -> int:
    """This process's number on its machine; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
