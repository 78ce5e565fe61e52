"""Where a run's numbers and texts go; ranks other than the first report nothing."""

from megarlhf.config.runs import AnyRun, OnlineRun
from megarlhf.telemetry.console import ConsoleSink
from megarlhf.telemetry.jsonl import JsonlSink
from megarlhf.telemetry.report import Reporter
from megarlhf.telemetry.tensorboard import TensorboardSink


def reporter(settings: AnyRun, rank: int) -> Reporter:
    """Console, metrics.jsonl, samples.jsonl and, if asked, tensorboard on rank 0."""
    if rank != 0:
        return Reporter(())
    sinks = [JsonlSink(settings.run.dir), ConsoleSink(settings.run.steps if isinstance(settings, OnlineRun) else None)]
    return Reporter([*sinks, TensorboardSink(settings.run.dir)] if settings.run.tensorboard else sinks)
