"""One run, one program: all ranks have the same settings, code and packages, or none of them starts."""

import json
import socket
from collections import Counter
from hashlib import blake2b

import torch.distributed as dist

from megarlhf.config.load import to_dict
from megarlhf.config.runs import AnyRun
from megarlhf.device.versions import versions
from megarlhf.errors import ConfigError


def require_agreement(settings: AnyRun, group: dist.ProcessGroup) -> None:
    """Collective over `group`. Raises ConfigError on all ranks, naming those that differ from most others."""
    text = json.dumps(to_dict(settings), sort_keys=True)
    mine = {"settings": blake2b(text.encode(), digest_size=8).hexdigest(), **versions()}
    everyone: list[tuple[str, dict[str, str]] | None] = [None] * group.size()
    dist.all_gather_object(everyone, (socket.gethostname(), mine), group=group)
    wrong = disagreements([found for found in everyone if found is not None])
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
