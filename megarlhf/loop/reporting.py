"""Where a run's numbers and texts go; ranks other than the first report nothing."""

from megarlhf.config.runs import AnyRun, OnlineRun
from megarlhf.telemetry.console import ConsoleSink, JsonConsoleSink
from megarlhf.telemetry.jsonl import JsonlSink
from megarlhf.telemetry.report import Reporter
from megarlhf.telemetry.tensorboard import TensorboardSink


def reporter(settings: AnyRun, rank: int, *, as_json: bool = False) -> Reporter:
    """Console (a table, or JSON lines), metrics.jsonl, samples.jsonl and, if asked, tensorboard on rank 0."""
    if rank != 0:
        return Reporter(())
    num_steps = settings.run.steps if isinstance(settings, OnlineRun) else None
    sinks = [JsonlSink(settings.run.dir), JsonConsoleSink() if as_json else ConsoleSink(num_steps)]
    return Reporter([*sinks, TensorboardSink(settings.run.dir)] if settings.run.tensorboard else sinks)
