"""Charts of one or several runs as SVG text, to be put into a page."""

import io
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megarlhf.telemetry.page.record import RunRecord

GIB = 2**30
COLOURS = ("#2f6f9f", "#c8553d", "#588157", "#8d6a9f", "#b08900", "#3d8c8c", "#9a5b3c", "#6c757d")


@dataclass(frozen=True)
class Panel:
    """One chart: metrics over steps on one axis."""

    title: str
    names: tuple[str, ...]
    """Metrics that are drawn where the run has them."""
    unit: str = ""


@dataclass(frozen=True)
class Chart:
    """A drawn chart."""

    title: str
    svg: str


PANELS = (
    Panel("Score and reward", ("objective/scores", "objective/rlhf_reward")),
    Panel("KL to the reference", ("objective/kl",), "nats"),
    Panel("Loss", ("loss/sft_avg", "loss/reward_avg", "loss/dpo_avg", "loss/kto_avg")),
    Panel("Accuracy on the batch", ("rewards/accuracy",)),
    Panel("Reward margin", ("rewards/margin", "rewards/chosen", "rewards/rejected")),
    Panel("Length of responses", ("rollout/length_avg",), "tokens"),
    Panel("Responses that ended by themselves", ("val/num_eos_tokens",), "per step"),
    Panel("Clipped tokens", ("policy/clipfrac_avg", "val/clipfrac_avg"), "share"),
    Panel("KL of an update", ("policy/approxkl_avg",), "nats"),
    Panel("Explained variance of the values", ("val/explained_variance",)),
    Panel("Entropy of the policy", ("objective/entropy",), "nats per token"),
    Panel("Policy and value loss", ("loss/policy_avg", "loss/value_avg")),
    Panel("Gradient norm", ("gradient_norm/actor", "gradient_norm/critic", "gradient_norm/reward")),
    Panel("Learning rate", ("lr/actor", "lr/critic", "lr/reward")),
    Panel("Largest gap between sampler and trainer", ("rollout/logp_gap_max",), "nats"),
    Panel("Bytes between ranks when weights move", ("bytes/resharded",), "bytes"),
)


def curves(runs: Sequence[RunRecord]) -> list[Chart]:
    """A chart for every panel that some run has numbers for; several runs share its axes."""
    found = []
    for panel in PANELS:
        lines = [(run, name) for run in runs for name in panel.names if run.series(name)[0]]
        if lines:
            found.append(Chart(panel.title, drawn(partial(_curves, panel, lines, len(runs) > 1))))
    return found


def _curves(panel: Panel, lines: list[tuple[RunRecord, str]], is_comparison: bool, axes: Axes) -> None:
    for index, (run, name) in enumerate(lines):
        label = f"{run.name}: {name}" if is_comparison and len(panel.names) > 1 else run.name if is_comparison else name
        steps, values = run.series(name)
        axes.plot(steps, values, label=label, color=COLOURS[index % len(COLOURS)], linewidth=1.6)
    axes.set_xlabel("step")
    axes.set_ylabel(panel.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8)


def reward_against_kl(run: RunRecord) -> Chart | None:
    """Each step's mean score over its KL to the reference, coloured by step; None without both."""
    rows = [row for row in run.steps if row.get("objective/scores") is not None and row.get("objective/kl") is not None]
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        kl, scores = [row["objective/kl"] for row in rows], [row["objective/scores"] for row in rows]
        axes.plot(kl, scores, color="#cccccc", linewidth=0.8, zorder=1)
        dots = axes.scatter(kl, scores, c=[row["step"] for row in rows], cmap="viridis", s=18, zorder=2)
        axes.figure.colorbar(dots, ax=axes, label="step")
        axes.set_xlabel("KL to the reference, nats")
        axes.set_ylabel("score")

    return Chart("Score against KL", drawn(draw))


def stage_times(run: RunRecord) -> Chart | None:
    """The median step from left to right: how long each stage took, in the order of the step."""
    names = [name for name in run.names if name.startswith("time/") and name != "time/total_s"]
    medians = [(name[len("time/") : -len("_s")], statistics.median(run.series(name)[1])) for name in names]
    if not medians:
        return None

    def draw(axes: Axes) -> None:
        start = 0.0
        for index, (name, seconds) in enumerate(medians):
            axes.barh(name, seconds, left=start, color=COLOURS[index % len(COLOURS)])
            axes.text(start + seconds, index, f" {seconds:.3g} s", va="center", fontsize=8)
            start += seconds
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * start)
        axes.set_xlabel("seconds since the step began (median over steps)")

    return Chart("Stages of a step", drawn(draw))


def memory_of_stages(run: RunRecord) -> Chart | None:
    """What each stage of the last step held, by place, and its peak, summed over ranks."""
    last = [row for row in run.memory if row["step"] == run.memory[-1]["step"]] if run.memory else []
    if not last:
        return None

    def draw(axes: Axes) -> None:
        names, left = [row["stage"] for row in last], [0.0] * len(last)
        for index, place in enumerate(("device", "host", "disk")):
            values = [row[f"{place}_bytes"] / GIB for row in last]
            axes.barh(names, values, left=left, color=COLOURS[index], label=place)
            left = [one + other for one, other in zip(left, values, strict=True)]
        peaks = [row["peak_bytes"] / GIB for row in last]
        axes.scatter(peaks, range(len(last)), marker="|", s=160, color="black", label="peak")
        axes.invert_yaxis()
        axes.set_xlabel("GiB over all ranks")
        axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))

    return Chart("Memory of the last step's stages", drawn(draw))


def memory_over_steps(run: RunRecord) -> Chart | None:
    """Peak and moved bytes per step."""
    if not run.series("memory/peak_gib")[0]:
        return None
    panel = Panel("Memory over steps", ("memory/peak_gib", "memory/moved_gib"), "GiB")
    lines = [(run, name) for name in panel.names if run.series(name)[0]]
    return Chart(panel.title, drawn(partial(_curves, panel, lines, False)))


def drawn(draw: Callable[[Axes], None], height: float = 3.2) -> str:
    """An SVG that scales with the page; text stays text, so that it can be searched and read aloud.

    `height`: in inches, where the width is 5.4.
    """
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "megarlhf", "font.family": "sans-serif"}):
        figure = Figure(figsize=(5.4, height), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
