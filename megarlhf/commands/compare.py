"""`megarlhf compare`: several runs on common axes, and the settings in which they differ."""

from collections.abc import Sequence
from pathlib import Path

from megarlhf.commands.report import require_extra, write_page
from megarlhf.config.flags import Parser
from megarlhf.errors import ConfigError

SUMMARY = "write several runs on common axes as one HTML file: megarlhf compare RUN_DIR RUN_DIR ... [--out FILE.html]"


def main(argv: Sequence[str]) -> int:
    """Writes compare.html, or the file given. Raises DataError when a folder holds no run."""
    parser = Parser(prog="megarlhf compare", description=SUMMARY.partition(":")[0])
    parser.add_argument("runs", metavar="RUN_DIR", nargs="+", help="run folders (run.dir)")
    parser.add_argument("--out", default="compare.html", metavar="FILE.html", help="default: compare.html")
    words = parser.parse_args(argv)
    if len(words.runs) < 2:
        raise ConfigError(f"compare: one run ({words.runs[0]}); give two or more, or use megarlhf report RUN_DIR")
    require_extra()
    from megarlhf.telemetry.page.page import comparison_page
    from megarlhf.telemetry.page.record import read_run

    write_page(Path(words.out), comparison_page([read_run(folder) for folder in words.runs]))
    return 0
