"""What is where through a step: each tenant's bytes on device, host and disk, stage by stage, and what is moved."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from megarlhf.telemetry.page.charts import COLOURS, Chart, drawn
from megarlhf.telemetry.page.record import RunRecord

PLACES = ("device", "host", "disk")
_UNITS = ("B", "K", "M", "G", "T")
_ROW_INCHES = 0.27


def last_stages(run: RunRecord) -> list[dict[str, Any]]:
    """Rows of memory.jsonl about the last step, in the order of its stages."""
    return [row for row in run.memory if row["step"] == run.memory[-1]["step"]]


def residency(run: RunRecord) -> Chart | None:
    """The last step from left to right, a row per tenant; None where memory.jsonl does not tell tenants."""
    rows = [row for row in last_stages(run) if row.get("tenants")]
    sizes = {tenant: _largest(rows, tenant) for row in rows for tenant in row["tenants"]}
    tenants = [tenant for tenant, size in sizes.items() if size]
    if not tenants:
        return None

    def draw(axes: Axes) -> None:
        for at, row in enumerate(rows):
            for line, tenant in enumerate(tenants):
                _cell(axes, at, line, row["tenants"].get(tenant, {}))
        axes.set_xticks(range(len(rows)), [row["stage"] for row in rows], rotation=40, ha="right", fontsize=8)
        axes.set_yticks(range(len(tenants)), tenants, fontsize=8)
        axes.set_xlim(-0.5, len(rows) - 0.5)
        axes.set_ylim(len(tenants) - 0.5, -0.5)
        axes.grid(visible=False)
        handles = [Patch(color=COLOURS[index], label=place) for index, place in enumerate(PLACES)]
        axes.legend(handles=handles, frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))

    return Chart("What is where, stage by stage", drawn(draw, _height(len(tenants))))


def moved(run: RunRecord) -> Chart | None:
    """Bytes that come in and go out before each stage of the last step; None where nothing moves."""
    rows = [row for row in last_stages(run) if row.get("bytes_in") or row.get("bytes_out")]
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        names = [row["stage"] for row in rows]
        axes.barh(names, [row["bytes_in"] / 2**30 for row in rows], color=COLOURS[0], label="to the device")
        axes.barh(names, [-row["bytes_out"] / 2**30 for row in rows], color=COLOURS[1], label="from it")
        for at, row in enumerate(rows):
            axes.text(row["bytes_in"] / 2**30, at, f" {row['move_s']:.2g} s", va="center", fontsize=8)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel("GiB over all ranks, before the stage")
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))

    return Chart("What is moved, and how long it takes", drawn(draw, _height(len(rows))))


def _largest(rows: Sequence[dict[str, Any]], tenant: str) -> int:
    """Most bytes of a tenant anywhere in the step."""
    return max(sum(row["tenants"].get(tenant, {}).values()) for row in rows)


def _cell(axes: Axes, at: int, line: int, places: dict[str, int]) -> None:
    """A tenant in a stage: as wide as the stage, shared out by place; empty where it has no bytes."""
    total, left = sum(places.values()), at - 0.5
    for index, place in enumerate(PLACES):
        if places.get(place):
            width = places[place] / total
            axes.barh(line, width, left=left, height=0.8, color=COLOURS[index], edgecolor="white", linewidth=0.6)
            left += width
    if total:
        axes.text(at, line, short(total), ha="center", va="center", fontsize=6.5, color="white")


def short(num_bytes: float) -> str:
    """`1.2G`: at most four characters."""
    for unit in _UNITS:
        if num_bytes < 999.5:
            return f"{num_bytes:.1f}{unit}" if num_bytes < 9.95 and unit != "B" else f"{num_bytes:.0f}{unit}"
        num_bytes /= 1024
    return f"{num_bytes:.0f}P"


def _height(num_rows: int) -> float:
    return max(2.0, 1.1 + _ROW_INCHES * num_rows)
