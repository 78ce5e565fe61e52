"""`megarlhf report`: a run as one HTML file."""

from collections.abc import Sequence
from pathlib import Path

from megarlhf.config.flags import Parser
from megarlhf.errors import ConfigError

SUMMARY = "write a run's curves, stages, texts and signs as one HTML file: megarlhf report RUN_DIR [--out FILE.html]"


def main(argv: Sequence[str]) -> int:
    """Writes RUN_DIR/report.html, or the file given. Raises DataError when the folder holds no run."""
    parser = Parser(prog="megarlhf report", description=SUMMARY.partition(":")[0])
    parser.add_argument("run", metavar="RUN_DIR", help="run folder (run.dir)")
    parser.add_argument("--out", default="", metavar="FILE.html", help="default: RUN_DIR/report.html")
    words = parser.parse_args(argv)
    require_extra()
    from megarlhf.telemetry.page.page import run_page
    from megarlhf.telemetry.page.record import read_run

    run = read_run(words.run)
    write_page(Path(words.out or run.folder / "report.html"), run_page(run))
    return 0


def require_extra() -> None:
    """Raises ConfigError where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as problem:
        raise ConfigError(f"report: needs matplotlib ({problem}); pip install 'megarlhf[report]'") from problem


def write_page(path: Path, html: str) -> None:
    """Writes the file and says where it is. Raises ConfigError when it cannot be written."""
    try:
        path.write_text(html, encoding="utf-8")
    except OSError as problem:
        raise ConfigError(f"--out: {path} cannot be written: {problem.strerror}; choose another file") from problem
    print(f"report: {path}")
