"""One run, one program: all ranks have the same settings, code, packages and files, or none of them starts."""

import json
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b

import torch.distributed as dist

from megarlhf.config.load import to_dict
from megarlhf.config.runs import AnyRun
from megarlhf.device.versions import versions
from megarlhf.device.world import meet
from megarlhf.errors import ConfigError, PeerError
from megarlhf.parallel.rows import gather_objects

_MEET_S, _WRONG_MEET_S = 600, 60
"""How long ranks wait for each other before the start; one that cannot start anyway waits less."""
_LEAVE_S = 10


def require_agreement(settings: AnyRun, group: dist.ProcessGroup) -> None:
    """Collective over `group`. Raises ConfigError on all ranks, naming those that differ from most others."""
    text = json.dumps(to_dict(settings), sort_keys=True)
    mine = {"settings": blake2b(text.encode(), digest_size=8).hexdigest(), **versions()}
    wrong = disagreements(gather_objects((socket.gethostname(), mine), group))
    if wrong:
        raise ConfigError(wrong)


def disagreements(everyone: list[tuple[str, dict[str, str]]]) -> list[str]:
    """What differs between ranks, given (host, what it has) of each: a sentence per difference."""
    found = []
    for name in everyone[0][1]:
        values = [mine[name] for _, mine in everyone]
        usual = Counter(values).most_common(1)[0][0]
        others = [
            f"rank {rank} on {everyone[rank][0]} has {value}" for rank, value in enumerate(values) if value != usual
        ]
        if others:
            more = f" and {len(others) - 4} more" if len(others) > 4 else ""
            move = "give all ranks the same file and flags" if name == "settings" else "install the same everywhere"
            found.append(f"{name}: most ranks have {usual}, but {', '.join(others[:4])}{more}; {move}")
    return found


def start_together(found: Sequence[str]) -> dist.Store:
    """The store where all launched ranks met, on none of which anything is wrong. Collective.

    `found` is what is wrong on this rank; what is wrong on any of them is raised on all, as ConfigError.
    """
    try:
        rank, world_size, store = meet(_WRONG_MEET_S if found else _MEET_S)
        anywhere = found_anywhere(found, store, rank, world_size)
    except (ConfigError, PeerError):
        if found:
            raise ConfigError(found) from None  # this rank's own, when the others cannot be asked
        raise
    if anywhere:
        raise ConfigError(anywhere)
    return store


def found_anywhere(mine: Sequence[str], store: dist.Store, rank: int, world_size: int) -> list[str]:
    """What is wrong on any rank, given what is wrong on this one; the same on all. Collective, by the store alone.

    Raises PeerError when a rank does not say in the time that the ranks had for meeting.
    """
    try:
        store.set(f"preflight/{rank}", json.dumps([socket.gethostname(), list(mine)]))
        if rank == 0:
            everyone = [json.loads(store.get(f"preflight/{other}")) for other in range(world_size)]
            store.set("preflight/all", json.dumps(merged_violations(everyone)))
        found = json.loads(store.get("preflight/all"))
    except dist.DistError as problem:
        raise PeerError(f"not all ranks said whether they can start: {problem}") from problem
    if found:  # the store may go with the first rank or launcher to leave, so nobody leaves before all have heard
        with suppress(dist.DistError):
            store.set(f"preflight/heard/{rank}", "")
            store.wait([f"preflight/heard/{other}" for other in range(world_size)], timedelta(seconds=_LEAVE_S))
    return found


def merged_violations(everyone: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Violations of all ranks, given (host, violations) of each: once each, with the ranks where not all have it."""
    found = []
    for sentence in dict.fromkeys(sentence for _, mine in everyone for sentence in mine):
        holders = [f"rank {rank} on {host}" for rank, (host, mine) in enumerate(everyone) if sentence in mine]
        more = f" and {len(holders) - 4} more" if len(holders) > 4 else ""
        is_on_all = len(holders) == len(everyone)
        found.append(sentence if is_on_all else f"{', '.join(holders[:4])}{more}: {sentence}")
    return found
