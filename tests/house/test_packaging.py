"""What installs the package is pinned, shared by all targets, and free of the two packages that break megatron-core."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def declared() -> list[Requirement]:
    """Everything setup.py asks for, extras included, read from its source."""
    (call,) = [node for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if _is_setup(node)]
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    extras = ast.literal_eval(keywords["extras_require"])
    assert set(extras) == {"te", "report", "hub", "wandb", "parquet", "datasets", "dev"}
    needed = ast.literal_eval(keywords["install_requires"]) + [text for texts in extras.values() for text in texts]
    return [Requirement(text) for text in needed]


def _is_setup(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setup"


def test_neither_pypis_apex_nor_a_bare_transformer_engine_is_asked_for():
    for requirement in declared() + constraints():
        assert requirement.name != "apex"
        assert requirement.name != "transformer-engine" or "pytorch" in requirement.extras


@pytest.mark.parametrize(
    ("python", "megatron", "transformers"),
    [("3.11", "0.16.1", "5."), ("3.12", "0.19.2", "4.57."), ("3.13", "0.19.2", "4.57.")],
)
def test_each_python_has_one_tested_set_of_versions(python, megatron, transformers):
    chosen = {}
    for requirement in constraints():
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            assert requirement.name not in chosen
            chosen[requirement.name] = str(requirement.specifier)
    assert chosen["torch"] == "==2.13.0" and chosen["megatron-core"] == f"=={megatron}"
    assert chosen["transformers"].startswith(f"=={transformers}")


def test_pinned_versions_satisfy_what_setup_asks_for():
    for wanted in declared():
        pins = [pin for pin in constraints() if pin.name == wanted.name]
        assert pins or wanted.name == "transformer-engine", f"{wanted.name} is not pinned"
        assert all(wanted.specifier.contains(str(pin.specifier).removeprefix("==")) for pin in pins)


def test_this_environment_runs_the_tested_versions():
    here = {"python_version": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for pin in constraints():
        if pin.name in ("torch", "megatron-core", "transformers") and (pin.marker is None or pin.marker.evaluate(here)):
            assert pin.specifier.contains(version(pin.name)), f"{pin.name} {version(pin.name)} is installed, not {pin}"


def test_torch_is_installed_first_at_the_pinned_version():
    recipe = (ROOT / "Makefile").read_text()
    installs = re.findall(r"\$\(PIP\) (.*)", recipe)
    assert installs[0] == "torch==2.13.0" and all("-c constraints.txt" in install for install in installs[1:])


def test_make_targets_install_what_they_need():
    fresh = ["PYTHON=python3", "VENV=no-such-folder", "ASSETS=no-such-file"]
    for target, last in (("quickstart", "torchrun"), ("test", "pytest"), ("test-core", "pytest"), ("lint", "ruff")):
        planned = subprocess.run(["make", "--dry-run", target, *fresh], cwd=ROOT, capture_output=True, text=True)
        assert planned.returncode == 0, planned.stderr
        assert 0 < planned.stdout.index("no-such-folder/bin/python -m pip install") < planned.stdout.rindex(last)
        assert (".py assets" in planned.stdout) == (target != "lint")


def test_pyproject_holds_tool_settings_only():
    assert set(tomllib.loads((ROOT / "pyproject.toml").read_text())) == {"tool"}


def test_the_ci_script_stops_at_the_first_failure_and_runs_both_pythons():
    script = (ROOT / ".ci/run").read_text()
    assert "set -euo pipefail" in script and "make --no-print-directory test" in script and "3.12" in script
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_the_hooks_before_a_commit_run():
    """Each hook's command, as pre-commit would run it, with this environment for `.venv`."""
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["id"]: hook for hook in repository["hooks"]}
    assert set(hooks) == {"ruff", "house", "mypy"} and hooks["mypy"]["stages"] == ["manual"]
    for hook in hooks.values():
        program, *words = hook["entry"].split()
        assert (Path(sys.executable).parent / Path(program).name).exists() and program.startswith(".venv/bin/")
        assert all((ROOT / word).exists() for word in words if word.endswith(".py"))
    words = hooks["ruff"]["entry"].split()[1:]
    subprocess.run([sys.executable, "-m", "ruff", *words, "setup.py"], cwd=ROOT, check=True)


def test_types_hold():
    """mypy with the settings in pyproject.toml; its cache makes a second run quick."""
    checked = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout[-5000:] + checked.stderr[-2000:]


def test_the_packages_say_that_they_have_types():
    for package in ("megarlhf", "checkpoints_tools"):
        assert (ROOT / package / "py.typed").exists()
        assert re.search(rf'"{package}": \[[^]]*"py.typed"', (ROOT / "setup.py").read_text())
