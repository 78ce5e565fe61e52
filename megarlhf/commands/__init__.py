"""The commands: one module each, with SUMMARY (one line, a plain string) and main(argv) -> exit code.

A module is imported only when its command runs; SUMMARY is read from the source.
"""

import ast
import pkgutil
from pathlib import Path


def command_summaries() -> dict[str, str]:
    """Each command and its one line, read from the sources without importing them."""
    folder = Path(__path__[0])
    return {
        module.name.replace("_", "-"): _summary(folder / f"{module.name}.py")
        for module in pkgutil.iter_modules(__path__)
    }


def _summary(path: Path) -> str:
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "SUMMARY":
            return ast.literal_eval(statement.value)
    raise AssertionError(f"{path} has no SUMMARY")
