"""The report of a run: what is read, which signs show, and the page in a real browser at two widths."""

import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megarlhf.errors import ConfigError, DataError
from megarlhf.telemetry.page.record import read_run
from megarlhf.telemetry.page.signs import signs

STEPS = 25


def write_run(folder: Path, *, samples: list[dict] = (), **series: list[float | None]) -> Path:
    """A run folder with these metrics (25 steps of healthy ones by default)."""
    rng = random.Random(0)
    metrics = {
        "objective/scores": [0.1 + 0.02 * step for step in range(STEPS)],
        "objective/rlhf_reward": [0.1 + 0.01 * step for step in range(STEPS)],
        "objective/kl": [1 + 0.1 * step for step in range(STEPS)],
        "objective/entropy": [3 - 0.02 * step for step in range(STEPS)],
        "time/generate_s": [1.0 + rng.random() for _ in range(STEPS)],
        "time/learn_actor_s": [2.0] * STEPS,
        "time/total_s": [3.5] * STEPS,
        "memory/peak_gib": [1.5] * STEPS,
    }
    metrics |= {name.replace("__", "/"): values for name, values in series.items()}
    folder.mkdir(parents=True)
    rows = [{"step": i + 1, **{name: values[i] for name, values in metrics.items()}} for i in range(STEPS)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = samples or [
        {"step": step, "prompt": "Once", "response": f" upon <b>{step}</b>", "score": rng.random(), "tokens": 8}
        for step in (1, STEPS)
        for _ in range(4)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    places = {"device_bytes": 2**30, "host_bytes": 2**29, "disk_bytes": 0, "peak_bytes": 2**31}
    moved = {"bytes_in": 2**29, "bytes_out": 0, "move_s": 0.25}
    tenants = {
        "generate": {"actor.optimizer": {"device": 0, "host": 3 * 2**29, "disk": 0}, "critic.weights": {"device": 0}},
        "learn_actor": {"actor.optimizer": {"device": 2**29, "host": 2**30, "disk": 0}},
    }
    stages = [{"step": STEPS, "stage": stage, **places, **moved, "tenants": tenants[stage]} for stage in tenants]
    (folder / "memory.jsonl").write_text("".join(json.dumps(row) + "\n" for row in stages))
    shown = {
        "step": STEPS,
        "prompt": "Twice",
        "before": "dull",
        "before_score": 0.125,
        "after": "<i>",
        "after_score": 2,
    }
    (folder / "before_after.jsonl").write_text(json.dumps(shown) + "\n")
    (folder / "config.yaml").write_text(f"run: {{dir: {folder.name}}}\nactor: {{train: {{tp: {len(folder.name)}}}}}\n")
    (folder / "status.json").write_text('{"code": 0, "reason": "done"}')
    return folder


def names(folder: Path) -> list[str]:
    return [sign.name for sign in signs(read_run(folder))]


def texts(count: int = 40, **changed) -> list[dict]:
    """Sampled rows; a changed value is called with the row's number."""
    rng = random.Random(1)
    plain = {
        "response": lambda number: f"answer {number}",
        "score": lambda number: rng.random(),
        "tokens": lambda number: rng.randrange(5, 60),
        "finished": lambda number: True,
    }
    return [
        {"step": 1 + number // 4, "prompt": "p", **{name: value(number) for name, value in (plain | changed).items()}}
        for number in range(count)
    ]


def test_a_healthy_run_shows_no_sign(tmp_path):
    assert names(write_run(tmp_path / "run", samples=texts())) == []


def test_score_that_follows_length(tmp_path):
    rows = texts(tokens=lambda number: number, score=lambda number: number / 40)
    assert names(write_run(tmp_path / "run", samples=rows)) == ["score follows length"]


def test_kl_spike_and_entropy_collapse(tmp_path):
    kl = [1 + 0.01 * step for step in range(STEPS)]
    kl[12] = 6.0
    collapsed = [3.0] * 10 + [0.4] * 15
    folder = write_run(tmp_path / "run", objective__kl=kl, objective__entropy=collapsed)
    assert names(folder) == ["KL spike", "entropy collapse"]
    assert "step 13" in signs(read_run(folder))[0].words and "5." in signs(read_run(folder))[0].words


def test_a_kl_that_grows_from_nothing_is_no_spike(tmp_path):
    """The quickstart's, as it was measured."""
    kl = [0, -0.09, 0.27, 0.61, 1.19, 0.86, 1.66, 3.78, 3.49, 3.36, 4.16, 4.22, 4.52, 5.37, 5.44, 6.19, 7.25, 8.39]
    assert names(write_run(tmp_path / "run", objective__kl=kl + [8.0] * 7)) == []


def test_lost_ends_and_duplicates(tmp_path):
    rows = texts(
        finished=lambda number: number < 10, response=lambda number: "always this" if number > 20 else str(number)
    )
    assert names(write_run(tmp_path / "run", samples=rows)) == ["answers no longer end", "duplicate texts"]


def test_gaps_skipped_updates_and_numbers_that_are_not_finite(tmp_path):
    folder = write_run(
        tmp_path / "run",
        rollout__logp_gap_max=[0.0] * 24 + [0.7],
        updates__skipped=[None] * 3 + [1] + [None] * 21,
        gradient_norm__actor=[1.0] * 3 + [None] + [1.0] * 21,
    )
    found = names(folder)
    assert found[:2] == ["numbers that are not finite", "skipped updates"] and found[-1] == "sampler and trainer differ"


@pytest.mark.parametrize(
    ("actor", "gap", "advice"),
    [
        ("{}", 0.18, "verify-layout"),
        ("{dtype: bfloat16}", 0.18, ""),
        ("{dtype: bfloat16, generate_fp8: null}", 0.7, "verify-layout"),
        ("{dtype: bfloat16, generate_fp8: {recipe: blockwise}}", 0.7, ""),
        ("{dtype: bfloat16, generate_fp8: {recipe: blockwise}}", 1.5, "actor.generate_fp8"),
        ("{dtype: bfloat16, fp8: {recipe: blockwise}, generate_fp8: null}", 1.5, "verify-layout"),
    ],
)
def test_the_gap_that_rounding_explains_is_that_of_the_precision(actor, gap, advice, tmp_path):
    folder = write_run(tmp_path / "run", rollout__logp_gap_max=[0.001] * 24 + [gap])
    (folder / "config.yaml").write_text(f"actor: {actor}\n")
    found = signs(read_run(folder))
    assert [sign.name for sign in found] == ["sampler and trainer differ"] * bool(advice)
    assert all(advice in sign.words for sign in found)


def test_rewards_that_cannot_be_told_apart(tmp_path):
    idle = {"objective__groups_without_signal": [0.5] * 10 + [1.0] * 15}
    found = signs(read_run(write_run(tmp_path / "groups", objective__scores=[0.0] * STEPS, **idle)))
    assert [sign.name for sign in found] == ["nothing to learn from"] and "100% of the prompts" in found[0].words
    found = signs(read_run(write_run(tmp_path / "alone", objective__scores=[0.0] * STEPS)))
    assert [sign.name for sign in found] == ["nothing to learn from"] and "mean score is 0" in found[0].words
    assert names(write_run(tmp_path / "some", objective__groups_without_signal=[0.6] * STEPS)) == []


def test_a_folder_without_a_step_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no steps in metrics\.jsonl; give the folder \(run\.dir\)"):
        read_run(tmp_path)
    with pytest.raises(DataError, match=r"nowhere: no such folder; give the folder \(run\.dir\)"):
        read_run(tmp_path / "nowhere")
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("not json\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:26: not JSON"):
        read_run(folder)


def test_a_last_line_that_is_being_written_is_left_out(tmp_path):
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 26, "objecti')
    assert len(read_run(folder).steps) == STEPS


def page(argv: list[str], module: str) -> str:
    import importlib

    assert importlib.import_module(f"megarlhf.commands.{module}").main(argv) == 0
    return Path(argv[-1]).read_text()


def test_the_page_holds_everything_and_escapes_what_was_sampled(tmp_path):
    pytest.importorskip("matplotlib")
    html = page([str(write_run(tmp_path / "run")), "--out", str(tmp_path / "out.html")], "report")
    for words in ("Score against KL", "Stages of a step", "Memory of the last step", "None of the signs", "actor"):
        assert words in html
    for words in ("What is where", "actor.optimizer", "1.5G", "What is moved", ">0.125<", ">2.000<", "&lt;i&gt;"):
        assert words in html
    assert "critic.weights" not in html  # it has no bytes anywhere
    assert "upon &lt;b&gt;25&lt;/b&gt;" in html and "<b>25</b>" not in html
    outside = [link for link in re.findall(r'(?:src|href)="([^"]+)"', html) if not link.startswith(("#", "data:"))]
    assert outside == [] and "<script" not in html and "@import" not in html


def test_a_comparison_names_the_settings_that_differ(tmp_path):
    pytest.importorskip("matplotlib")
    runs = [str(write_run(tmp_path / name)) for name in ("one", "other")]
    html = page([*runs, "--out", str(tmp_path / "out.html")], "compare")
    assert "<td>actor.train.tp</td>" in html and "one and other" in html
    from megarlhf.commands.compare import main

    with pytest.raises(ConfigError, match="give two or more"):
        main(runs[:1])


@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_a_browser_shows_the_page_without_sideways_scrolling(width, tmp_path):
    pytest.importorskip("matplotlib")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    out = tmp_path / "out.html"
    html = page([str(write_run(tmp_path / "run")), "--out", str(out)], "report")
    # The page says itself how wide it is laid out, so that the browser's own answer can be read from the dumped DOM.
    measured = "document.documentElement.scrollWidth, innerWidth, document.querySelectorAll('svg').length"
    out.write_text(html.replace("</body>", f"<script>document.title = [{measured}].join()</script></body>"))
    # A headless window cannot be as narrow as a phone; a frame in it can.
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe src="out.html" width="{width}" height="800" style="border:0" '
        'onload="document.title = this.contentDocument.title"></iframe>'
    )
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    shown = subprocess.run(
        [browser, *flags, f"--user-data-dir={tmp_path}/profile", "--window-size=1400,900", f"file://{frame}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    scroll, inner, charts = map(int, re.search(r"<title>(\d+),(\d+),(\d+)</title>", shown.stdout).groups())
    assert inner == width and scroll <= width and charts >= 6


def test_a_tenants_share_of_each_place_is_drawn_to_scale(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from megarlhf.telemetry.page import residency

    drawn = []
    monkeypatch.setattr(residency, "drawn", lambda draw, height: drawn.append(draw) or "")
    residency.residency(read_run(write_run(tmp_path / "run")))
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    drawn[0](axes)
    bars = [(bar.get_x(), bar.get_width(), bar.get_facecolor()) for bar in axes.patches]
    assert [(x, round(width, 6)) for x, width, _ in bars] == [
        (-0.5, 1.0),
        (0.5, round(1 / 3, 6)),
        (pytest.approx(0.5 + 1 / 3), round(2 / 3, 6)),
    ]
    assert bars[0][2] == bars[2][2] != bars[1][2]  # host, and device before host


def test_sizes_are_short():
    from megarlhf.telemetry.page.residency import short

    assert [short(size) for size in (0, 999, 1000, 1536, 10 * 2**20, 140e9)] == [
        "0B",
        "999B",
        "1.0K",
        "1.5K",
        "10M",
        "130G",
    ]
