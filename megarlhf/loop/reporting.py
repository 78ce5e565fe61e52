"""Where a run's numbers and texts go; ranks other than the first report nothing."""

from megarlhf.config.load import to_dict
from megarlhf.config.runs import AnyRun
from megarlhf.telemetry.console import ConsoleSink, JsonConsoleSink
from megarlhf.telemetry.jsonl import JsonlSink
from megarlhf.telemetry.report import Reporter, Sink
from megarlhf.telemetry.tensorboard import TensorboardSink
from megarlhf.telemetry.weights_and_biases import WandbSink


def reporter(settings: AnyRun, rank: int, *, as_json: bool = False, keep_steps: int = 0) -> Reporter:
    """Console (a table, or JSON lines), metrics.jsonl, samples.jsonl and, if asked, tensorboard and W&B, on rank 0.

    `keep_steps`: steps that a resumed run has done; what the files say of later ones is cut off.
    """
    if rank != 0:
        return Reporter(())
    run = settings.run
    sinks: list[Sink] = [JsonlSink(settings.run.dir, keep_steps)]
    if run.tensorboard:
        sinks.append(TensorboardSink(run.dir, keep_steps))
    if run.wandb != "off":
        sinks.append(WandbSink(run.dir, run.wandb, run.wandb_project, to_dict(settings), keep_steps))
    return Reporter(sinks, JsonConsoleSink() if as_json else ConsoleSink())
