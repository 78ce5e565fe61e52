"""The README is a promise: its commands exist and take their flags, its recipes fit their ranks, its links lead on."""

import re
import shlex
from pathlib import Path

import pytest

from megarlhf.cli import command_summaries, main
from megarlhf.commands.completion import Words, vocabulary
from megarlhf.config.check import violations
from megarlhf.config.load import load_command
from megarlhf.config.runs import COMMANDS

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "examples/README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(document: Path) -> list[str]:
    """Lines of the document's bash blocks, continued ones joined."""
    text = "\n".join(re.findall(r"```bash\n(.*?)```", document.read_text(), flags=re.DOTALL))
    return [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def commands() -> list[list[str]]:
    """Every megarlhf command line of the documents, from the launcher's first word on."""
    lines = [shlex.split(line, comments=True) for document in DOCUMENTS for line in blocks(document)]
    return [words for words in lines if words[0].rpartition("/")[2] in ("megarlhf", "torchrun")]


def after_megarlhf(words: list[str]) -> list[str]:
    at = max(number for number, word in enumerate(words) if word.rpartition("/")[2] == "megarlhf")
    return words[at + 1 :]


TRAINING = [words for words in commands() if after_megarlhf(words)[:1] and after_megarlhf(words)[0] in COMMANDS]


def test_the_documents_have_commands():
    assert len(commands()) >= 3 and TRAINING


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_exists(words):
    assert after_megarlhf(words)[0].replace("++", "-plus-plus") in command_summaries()


@pytest.mark.parametrize("words", TRAINING, ids=" ".join)
def test_every_training_command_fits_its_ranks(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    command, *arguments = after_megarlhf(words)
    ranks = int(words[words.index("--nproc-per-node") + 1]) if "--nproc-per-node" in words else 1
    settings = load_command(COMMANDS[command], arguments, prog=command)
    assert violations(settings, ranks) == []


@pytest.fixture(scope="module")
def known() -> dict[str, Words]:
    return vocabulary()


@pytest.mark.parametrize("words", [words for words in commands() if words not in TRAINING], ids=" ".join)
def test_every_other_command_takes_its_flags(words, known):
    name, *rest = after_megarlhf(words)
    parts = [name, *(rest[:1] if name == "convert" else [])]
    flags = {flag for key in (" ".join(parts), *rest[:1]) if key in known for flag in known[key].flags}
    used = {word.partition("=")[0] for word in rest if word.startswith("--")}
    assert used <= flags, f"{' '.join(parts)} does not take {used - flags}"


@pytest.mark.parametrize("words", [words for words in commands() if "show" in words], ids=" ".join)
def test_every_show_command_runs(words, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(after_megarlhf(words)) == 0
    assert "actor:" in capsys.readouterr().out


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(document):
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing


def test_the_table_of_commands_is_whole():
    text = (ROOT / "README.md").read_text()
    missing = [name for name in command_summaries() if f"megarlhf {name.replace('-plus-plus', '++')}" not in text]
    assert not missing


@pytest.mark.parametrize("target", ["quickstart", "test"])
def test_make_targets_exist(target):
    assert re.search(rf"`make {target}`|^make {target}$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def test_every_guide_is_reached_from_the_readme():
    links = set(re.findall(r"\]\((docs/[^)#]+\.md)\)", (ROOT / "README.md").read_text()))
    assert links == {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}


def test_the_readme_is_short_enough_to_be_read():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 250


def metric_names() -> set[str]:
    """What looks like a metric's name in the sources, with NAME for what is filled in."""
    rooms = "loss|objective|policy|val|rollout|rewards?|scores|updates|pretraining|memory|bytes|calibration|logp|lr"
    found = set()
    for room in ("algorithms", "engines", "loop", "residency", "telemetry"):
        for path in (ROOT / "megarlhf" / room).rglob("*.py"):
            found |= set(re.findall(rf'"((?:{rooms}|gradient_norm|time)/[a-zA-Z_{{}}/-]+)"', path.read_text()))
    read = {"calibration/NAME_NAME-NAME"}  # by the error over all bins, which writes none of its own
    return {re.sub(r"{.*?}", "NAME", name) for name in found} - read


def test_every_metric_is_explained():
    told = re.findall(r"`([a-z_]+/[a-zA-Z_/*]+)`", (ROOT / "docs/metrics.md").read_text())
    patterns = [re.sub(r"[A-Z]+|\\\*", "[^/]+", re.escape(name)) for name in told]
    names = metric_names()
    assert len(names) > 50 and "calibration/accuracy_NAME-NAME" in names
    assert {name for name in names if not any(re.fullmatch(one, name) for one in patterns)} == set()
