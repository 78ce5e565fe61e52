"""The page itself: one HTML file with everything in it."""

from collections.abc import Sequence
from pathlib import Path

import yaml
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from megarlhf.telemetry.page.charts import (
    Chart,
    curves,
    memory_of_stages,
    memory_over_steps,
    reward_against_kl,
    stage_times,
)
from megarlhf.telemetry.page.record import RunRecord
from megarlhf.telemetry.page.residency import moved, residency
from megarlhf.telemetry.page.signs import ends, signs

_TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
NUM_TEXTS = 8
"""Sampled texts shown of the first step, and of the last."""


def run_page(run: RunRecord) -> str:
    """The HTML of one run's report."""
    memory = [residency(run), memory_of_stages(run), moved(run), memory_over_steps(run)]
    charts = [reward_against_kl(run), *curves([run]), stage_times(run), *memory]
    first, last = _texts(run)
    return _TEMPLATES.get_template("run.html").render(
        run=run,
        state=_state(run),
        figures=_figures([run]),
        signs=signs(run),
        charts=_embedded([chart for chart in charts if chart is not None]),
        shown=run.shown,
        first=first,
        last=last,
    )


def comparison_page(runs: Sequence[RunRecord]) -> str:
    """The HTML of several runs beside each other."""
    return _TEMPLATES.get_template("comparison.html").render(
        runs=runs,
        figures=_figures(runs),
        differences=_differences(runs),
        charts=_embedded(curves(runs)),
        signs=[(run, signs(run)) for run in runs],
    )


def _embedded(charts: Sequence[Chart]) -> list[tuple[str, Markup]]:
    # The only text that is not escaped: matplotlib wrote it, and escaped what it was given.
    return [(chart.title, Markup(chart.svg)) for chart in charts]


def _state(run: RunRecord) -> str:
    if not run.status:
        return "goes on, or was killed"
    code, reason = run.status.get("code"), run.status.get("reason")
    return "is done" if code == 0 else f"ended with code {code}: {reason}"


def _figures(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Rows of a table: a metric, and for each run its mean in the first and in the last fifth of the steps."""
    wanted = (
        "objective/scores",
        "objective/kl",
        "objective/entropy",
        "loss/sft_avg",
        "loss/reward_avg",
        "loss/dpo_avg",
        "loss/kto_avg",
        "rewards/accuracy",
        "rollout/logp_gap_max",
        "time/total_s",
        "memory/peak_gib",
    )
    rows = []
    for name in wanted:
        values = [run.series(name)[1] for run in runs]
        if any(values):
            rows.append((name, ["{:.4g} → {:.4g}".format(*ends(one)) if one else "–" for one in values]))
    return rows


def _texts(run: RunRecord) -> tuple[list[dict], list[dict]]:
    """Sampled texts of the first and of the last step that has some, highest score first."""
    if not run.samples:
        return [], []
    picked = []
    for step in (run.samples[0]["step"], run.samples[-1]["step"]):
        rows = [row for row in run.samples if row["step"] == step]
        picked.append(sorted(rows, key=lambda row: -row.get("score", 0.0))[:NUM_TEXTS])
    return picked[0], picked[1]


def _differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Settings that are not the same in all runs: (dotted name, value in each)."""
    flat = [dict(_flattened("", yaml.safe_load(run.settings) or {})) for run in runs]
    names = dict.fromkeys(name for one in flat for name in one)
    values = {name: [str(one.get(name, "–")) for one in flat] for name in names}
    return [(name, found) for name, found in values.items() if len(set(found)) > 1]


def _flattened(prefix: str, value: object):
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flattened(f"{prefix}.{key}" if prefix else str(key), inner)
    else:
        yield prefix, value
