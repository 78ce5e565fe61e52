"""The house rules that a machine can check: who may import whom, lengths, and doors that stay shut."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = [
    {"errors"},
    {"config", "records", "launcher"},
    {"algorithms", "device", "telemetry"},
    {"parallel", "data", "rewards"},
    {"models", "residency"},
    {"weights"},
    {"checkpoints"},
    {"engines"},
    {"loop"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
"""Lowest first; an import points to a lower layer, or stays in its room."""
MAX_FILE_LINES, MAX_FUNCTION_LINES = 450, 90
SOURCES = sorted((ROOT / "megarlhf").rglob("*.py")) + sorted((ROOT / "checkpoints_tools").rglob("*.py"))
PACKAGE = [path for path in SOURCES if path.is_relative_to(ROOT / "megarlhf")]


def every(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: str(path.relative_to(ROOT)))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def room(path: Path) -> str:
    """`megarlhf/device/cpu.py` is in device, `megarlhf/errors.py` is errors, `megarlhf/__init__.py` is ''."""
    first = path.relative_to(ROOT / "megarlhf").parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def layer(name: str) -> int:
    found = [number for number, rooms in enumerate(LAYERS) if name in rooms]
    assert found, f"megarlhf/{name} is in no layer: give it one in {Path(__file__).name}"
    return found[0]


def imported_rooms(path: Path) -> set[str]:
    """Rooms of megarlhf that a file imports, at its top or inside functions."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} import by full name, not by dots"
            if node.module == "megarlhf":
                names |= {f"megarlhf.{alias.name}" for alias in node.names}
            else:
                names.add(node.module)
    parts = [name.split(".") for name in names]
    return {
        part[1] for part in parts if part[0] == "megarlhf" and len(part) > 1 and not part[1].startswith("__version")
    }


def docstrings(path: Path) -> set[int]:
    """Identities of string nodes that are documentation: strings standing alone as statements."""
    alone = [node.value for node in ast.walk(tree(path)) if isinstance(node, ast.Expr)]
    return {id(value) for value in alone if isinstance(value, ast.Constant)}


@every(PACKAGE)
def test_imports_point_downward(path):
    here = room(path)
    for other in imported_rooms(path) - {here}:
        if here:
            assert layer(other) < layer(here), f"{here} may not import {other}: it is not in a lower layer"
        else:
            assert other == "errors", f"importing megarlhf must stay free: it imports {other}"


@every(SOURCES)
def test_a_file_is_a_sittings_reading(path):
    assert len(path.read_text().splitlines()) < MAX_FILE_LINES


@every(SOURCES)
def test_a_module_opens_with_its_idea(path):
    if path.read_text().strip():
        assert ast.get_docstring(tree(path)), "the first statement of a module is a docstring"


@every(SOURCES)
def test_no_function_is_longer_than_a_page_and_a_half(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


@every(SOURCES)
def test_the_environment_is_read_in_device_launcher_and_cli_only(path):
    if path in PACKAGE and room(path) in {"device", "launcher", "cli"}:
        return
    for node in ast.walk(tree(path)):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        assert name not in {"environ", "getenv", "putenv"}, f"line {node.lineno}: read settings, not the environment"


@every(SOURCES)
def test_cuda_is_spoken_of_in_device_only(path):
    if path in PACKAGE and room(path) == "device":
        return
    documentation = docstrings(path)
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute):
            assert node.attr not in {"cuda", "is_cuda"}, f"line {node.lineno}: ask megarlhf.device"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            assert not node.value.startswith("cuda"), f"line {node.lineno}: ask megarlhf.device"


@every(SOURCES)
def test_no_global_statement(path):
    for node in ast.walk(tree(path)):
        assert not isinstance(node, ast.Global), f"line {node.lineno}"


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_importing_the_package_and_its_settings_loads_nothing_heavy():
    loaded = loaded_after("import megarlhf, megarlhf.errors, megarlhf.config.settings, megarlhf.config.layout")
    assert "megarlhf" in loaded and not loaded & {"torch", "transformers", "megatron", "numpy"}


def test_names_imported_from_the_package_are_there():
    """Imports inside functions too, which nothing checks before they run."""
    missing = []
    for path in sorted([*(ROOT / "megarlhf").rglob("*.py"), *(ROOT / "checkpoints_tools").glob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.level or not (node.module or "").startswith("megarlhf"):
                continue
            module = ROOT / node.module.replace(".", "/")
            file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
            text = file.read_text() if file.exists() else ""
            for name in (alias.name for alias in node.names):
                is_module = (module / name).is_dir() or (module / f"{name}.py").exists()
                if not is_module and not re.search(rf"\b{re.escape(name)}\b", text):
                    missing.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.module} has no {name}")
    assert not missing
