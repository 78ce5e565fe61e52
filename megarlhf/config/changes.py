"""Which settings a resumed run may change, and which would make it another run."""

import re
from typing import Any

_FREE = re.compile(
    r"run\.(?!seed$).*|(actor|critic|reward)\.train(\..*)?|actor\.generate(\..*)?|.*\.micro_batch_tokens|"
    r"data\.epochs|residency\..*|.*\.recompute|rollout\.max_slots|.*\.(timeout_s|retries|request_rows|token_file|url)"
)
"""Where ranks and files are and how long things may take: the mathematics stays the same. run.steps is among them."""


def flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under their dotted names."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The settings that are not the run's any more, in words: `name: was A, now B`."""
    old, new = flat(before), flat(now)
    names = [name for name in [*new, *(set(old) - set(new))] if not _FREE.fullmatch(name)]
    return [
        f"{name}: was {old.get(name, 'not there')!r}, now {new.get(name, 'not there')!r}"
        for name in dict.fromkeys(names)
        if old.get(name, None) != new.get(name, None)
    ]
