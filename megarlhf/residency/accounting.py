"""What memory a step took: per stage the bytes of each tenant at each place, the peak, what was moved and how long.

Records are made on every rank and added up over the ranks of the world; the fullest rank's peak is kept beside the sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarlhf.residency.stages import PLACES, Place, Tenant, gib


@dataclass(frozen=True)
class Record:
    """One stage of one rank, or added up over ranks."""

    stage: str
    resident: Mapping[Tenant, Mapping[Place, int]]
    """Bytes of each tenant by place, at the stage's fullest."""
    peak_bytes: int
    """Most that was allocated at once, above what was allocated before the models were built: tenants on the device
    (where device and host are one memory, also those on the host) and what the stage worked with."""
    peak_of_a_rank_bytes: int
    """The same of the fullest rank."""
    bytes_in: int
    """Copied to the device on the way in."""
    bytes_out: int
    """Copied to host or disk on the way in."""
    move_s: float
    """Seconds of that before the stage began, of the slowest rank. On a GPU, what leaves is waited for (its memory is
    needed next), and what comes in travels beside the stage's first work on the host."""

    def bytes_at(self, place: Place) -> int:
        """Bytes of all tenants there."""
        return sum(places.get(place, 0) for places in self.resident.values())

    def row(self) -> dict[str, object]:
        """Plain values, for memory.jsonl."""
        return {
            "stage": self.stage,
            **{f"{place}_bytes": self.bytes_at(place) for place in PLACES},
            "peak_bytes": self.peak_bytes,
            "peak_of_a_rank_bytes": self.peak_of_a_rank_bytes,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "move_s": round(self.move_s, 6),
            "tenants": {str(tenant): dict(places) for tenant, places in self.resident.items()},
        }


def merged(records: Sequence[Record]) -> list[Record]:
    """One record per stage in the order in which stages were first entered: the fullest moments, the sums of moves."""
    found: dict[str, Record] = {}
    for record in records:
        found[record.stage] = _both(found[record.stage], record) if record.stage in found else record
    return list(found.values())


def _both(one: Record, other: Record) -> Record:
    fuller = max(one, other, key=lambda record: (record.bytes_at("device"), record.bytes_at("host")))
    return Record(
        stage=one.stage,
        resident=fuller.resident,
        peak_bytes=max(one.peak_bytes, other.peak_bytes),
        peak_of_a_rank_bytes=max(one.peak_of_a_rank_bytes, other.peak_of_a_rank_bytes),
        bytes_in=one.bytes_in + other.bytes_in,
        bytes_out=one.bytes_out + other.bytes_out,
        move_s=one.move_s + other.move_s,
    )


def over_ranks(records: Sequence[Record], group: dist.ProcessGroup, device: torch.device) -> list[Record]:
    """Records of the same stages of all ranks, added up. Collective over `group`; every rank passes the same stages."""
    if not records:
        return []
    cells = [(record, tenant, place) for record in records for tenant in record.resident for place in PLACES]
    sums = [record.resident[tenant].get(place, 0) for record, tenant, place in cells]
    sums += [number for record in records for number in (record.peak_bytes, record.bytes_in, record.bytes_out)]
    total = torch.tensor(sums, dtype=torch.int64, device=device)
    ends = [[record.peak_bytes, record.move_s] for record in records]
    highest = torch.tensor(ends, dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    numbers = iter(total.tolist())
    resident = [
        {tenant: {place: next(numbers) for place in PLACES} for tenant in record.resident} for record in records
    ]
    return [
        Record(record.stage, places, next(numbers), int(peak), next(numbers), next(numbers), seconds)
        for record, places, (peak, seconds) in zip(records, resident, highest.tolist(), strict=True)
    ]


def metrics(records: Sequence[Record]) -> dict[str, float]:
    """Of a step: `memory/peak_gib` (sum over ranks of their peaks, at the fullest stage), `memory/peak_of_a_rank_gib`,
    `memory/moved_gib` (both directions) and `memory/move_s`."""
    if not records:
        return {}
    return {
        "memory/peak_gib": max(record.peak_bytes for record in records) / 2**30,
        "memory/peak_of_a_rank_gib": max(record.peak_of_a_rank_bytes for record in records) / 2**30,
        "memory/moved_gib": sum(record.bytes_in + record.bytes_out for record in records) / 2**30,
        "memory/move_s": sum(record.move_s for record in records),
    }


def table(records: Sequence[Record]) -> str:
    """The records as text, a line per stage; bytes are over all ranks."""
    lines = [f"{'stage':18}{'device':>12}{'host':>12}{'disk':>12}{'peak':>12}{'moved in':>12}{'out':>12}{'move s':>9}"]
    for record in records:
        numbers = [record.bytes_at(place) for place in PLACES]
        numbers += [record.peak_bytes, record.bytes_in, record.bytes_out]
        cells = "".join(f"{gib(number) if number else '-':>12}" for number in numbers)
        lines.append(f"{record.stage:18}{cells}{record.move_s:9.2f}")
    return "\n".join(lines)
