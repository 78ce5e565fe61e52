"""What a benchmark says: rows of one figure each, with its target and the command that measures it again.

A benchmark is a module of this folder with a `main` that takes `--json FILE`, measures and ends with

    finish([Row("rollout, float32", 2.4, "x transformers.generate", ">= 2.0")], options.json)

which prints the table and, where a file was asked for, leaves the rows there for `python -m tests.benchmarks`.
"""

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

_PACKAGES = ("torch", "megatron-core", "transformers", "trl")


@contextmanager
def scratch(folder: Path | None) -> Iterator[Path]:
    """A folder for the block, in `folder`, or among the temporary ones without it."""
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="benchmark_", dir=folder, ignore_cleanup_errors=True) as made:
        yield Path(made)


def this_command() -> str:
    """The command line of this process, as a user would type it at the root of the repository."""
    words = sys.orig_argv[1:]
    if "--json" in words:
        at = words.index("--json")
        words = words[:at] + words[at + 2 :]
    return shlex.join(["python", *words])


def this_environment() -> str:
    """Processor, cores, threads and the versions that matter; no host name, no date."""
    names = [line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")]
    cpu = names[0] if names else platform.machine()
    packages = ", ".join(f"{name} {found}" for name in _PACKAGES if (found := _version(name)))
    return f"{os.cpu_count()} cores of {cpu}, Python {platform.python_version()}, {packages}"


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class Row:
    """One figure."""

    name: str
    """What was measured, one of its kind in its benchmark."""
    figure: float | None
    """None: it could not be measured, and `note` says why."""
    unit: str
    target: str = ""
    """">= 2.0" or "<= 0.6"; empty where nothing is promised."""
    note: str = ""
    """What a reader needs beside the figure: the absolute times behind a ratio, the spread."""
    command: str = field(default_factory=this_command)
    environment: str = field(default_factory=this_environment)

    @property
    def is_met(self) -> bool | None:
        """None without a target; a figure that could not be measured does not meet its target."""
        if not self.target:
            return None
        if self.figure is None:
            return False
        sign, bound = self.target.split()
        return {">=": self.figure >= float(bound), "<=": self.figure <= float(bound)}[sign]


def table(rows: Sequence[Row]) -> str:
    """A Markdown table, then each command once and each environment once."""
    lines = ["| what | figure | target | met | note |", "|---|---|---|---|---|"]
    for row in rows:
        figure = "not measured" if row.figure is None else f"{row.figure:.3g} {row.unit}"
        met = {True: "yes", False: "NO", None: ""}[row.is_met]
        lines.append(f"| {row.name} | {figure} | {row.target} | {met} | {row.note} |")
    for command in dict.fromkeys(row.command for row in rows):
        names = "; ".join(row.name for row in rows if row.command == command)
        lines += ["", f"`{command}`: {names}."]
    for environment in dict.fromkeys(row.environment for row in rows):
        lines += ["", f"Measured on {environment}."]
    return "\n".join(lines) + "\n"


def write(rows: Sequence[Row], path: Path) -> None:
    """Rows as a JSON list of objects, `met` among their fields; replaces the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    objects = [asdict(row) | {"met": row.is_met} for row in rows]
    path.write_text(json.dumps(objects, indent=1) + "\n")


def read(path: Path) -> list[Row]:
    """What `write` wrote."""
    objects = json.loads(path.read_text())
    return [Row(**{name: value for name, value in fields.items() if name != "met"}) for fields in objects]


def finish(rows: Sequence[Row], path: Path | None) -> None:
    """Print the table; leave the rows in `path` where it is given."""
    print(table(rows), flush=True)
    if path is not None:
        write(rows, path)
