"""Runs the benchmarks one after another, each in its own process, and collects their rows.

python -m tests.benchmarks [NAME ...] [--out runs/bench]

Without names, all of this folder. One that fails is a row that says so and does not stop the others; the exit code is 1
if a benchmark failed, 0 also where a target is missed: a target is a fact about this machine, and is in the tables.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.report import Row, read, table, write

HERE = Path(__file__).parent


def names() -> list[str]:
    """The benchmarks of this folder."""
    return sorted(path.stem for path in HERE.glob("*.py") if "def main(" in path.read_text() and path.stem[0] != "_")


def run_one(name: str, out: Path, limit_s: float, package: str) -> list[Row]:
    """The rows of one benchmark, or the one that says that it failed; its output is in `out`/NAME.log."""
    path, log = out / f"{name}.json", out / f"{name}.log"
    path.unlink(missing_ok=True)
    words = [sys.executable, "-m", f"{package}.{name}"]
    try:
        with log.open("w") as stream:
            code = subprocess.run(
                [*words, "--json", str(path)], stdout=stream, stderr=subprocess.STDOUT, timeout=limit_s
            ).returncode
        problem = f"exit code {code}" if code else "" if path.exists() else "it left no rows"
    except subprocess.TimeoutExpired:
        problem = f"not done in {limit_s:.0f} s"
    if not problem:
        return read(path)
    note = f"FAILED: {problem}; see {log}"
    return [Row(name, None, "", note=note, command=f"python -m {package}.{name}")]


def collect(
    chosen: Sequence[str], out: Path, limit_s: float, package: str = "tests.benchmarks"
) -> dict[str, list[Row]]:
    """Rows by benchmark; the tables in `out` are written anew after each, so that a run that is stopped leaves them."""
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Row]] = {}
    for name in chosen:
        start = time.perf_counter()
        found[name] = run_one(name, out, limit_s, package)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        write([row for rows in found.values() for row in rows], out / "results.json")
        parts = [f"## {name}\n\n{table(rows)}" for name, rows in found.items()]
        (out / "results.md").write_text("# Benchmarks\n\n" + "\n".join(parts))
    return found


def main() -> int:
    """Prints which figures miss their targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names()))
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--limit_s", type=float, default=1200.0, help="longest time of one benchmark, seconds")
    given = parser.parse_args()
    if unknown := set(given.names) - set(names()):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    found = collect(given.names or names(), given.out, given.limit_s)
    rows = [row for rows in found.values() for row in rows]
    for row in rows:
        if row.is_met is False:
            figure = "not measured" if row.figure is None else f"{row.figure:.3g} {row.unit}"
            print(f"misses its target: {row.name}: {figure}, target {row.target}. {row.note}")
    failed = [row.name for row in rows if row.note.startswith("FAILED")]
    print(f"{given.out / 'results.md'}: {len(rows)} rows, {sum(bool(row.is_met) for row in rows)} targets met")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
