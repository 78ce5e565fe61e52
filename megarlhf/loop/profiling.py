"""Profiled steps: torch's trace of each rank, and what the time of each stage went to."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megarlhf import device
from megarlhf.device.labels import PREFIX
from megarlhf.telemetry.costs import STAGE, STEP, Event, costs, markdown, rows

_log = logging.getLogger(__name__)


def stage_label(name: str) -> AbstractContextManager:
    """The label of a stage of the loop; "total" is all of them."""
    return nullcontext() if name == "total" else device.labelled(STAGE + name)


@contextmanager
def profiled(folder: Path, step: int, steps: Sequence[int], rank: int) -> Iterator[None]:
    """Where `step` (counted from 1) is one of `steps`, the block is profiled. Local to the rank.

    Into `folder` go, for step N of rank R,
    step_N_rank_R.trace.json.gz  everything that ran, for chrome://tracing or ui.perfetto.dev
    step_N_rank_R.json           `telemetry.costs.StageCosts` of the step and of each stage
    step_N_rank_R.md             the same to read
    A disk that does not take them is warned about: the run goes on.
    """
    if step not in steps:
        yield
        return
    is_gpu = device.current().type != "cpu"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_gpu) as trace:
        with device.labelled(STEP):
            yield
            device.synchronize()
    try:
        _write(trace, folder, f"step_{step}_rank_{rank}")
    except (OSError, RuntimeError) as problem:  # torch writes the trace, and raises either
        _log.warning("the profile of step %d cannot be written in %s: %s", step, folder, problem)


def _write(trace: profile, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(folder / f"{name}.trace.json.gz"))
    found = costs([_event(one) for one in trace.events()])
    (folder / f"{name}.json").write_text(json.dumps(rows(found), indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(markdown(found), encoding="utf-8")


def _event(one: torch.autograd.profiler_util.FunctionEvent) -> Event:
    on_device = one.device_type != torch.autograd.DeviceType.CPU
    return Event(
        name=one.name.removeprefix(PREFIX),
        start_us=one.time_range.start,
        end_us=one.time_range.end,
        self_us=one.time_range.elapsed_us() if on_device else one.self_cpu_time_total,
        is_label=one.name.startswith(PREFIX) and not on_device,  # a GPU's timeline repeats the labels
        on_device=on_device and not one.name.startswith(PREFIX),
    )
