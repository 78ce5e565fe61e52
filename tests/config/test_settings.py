"""A setting that nothing reads would be a promise not kept."""

import ast
from pathlib import Path

from megarlhf import config
from megarlhf.config.fields import settings_of
from megarlhf.config.runs import COMMANDS

PACKAGE = Path(config.__path__[0]).parent


def sections(cls: type):
    yield cls
    for setting in settings_of(cls):
        if setting.is_section:
            yield from sections(setting.kind)


def attributes_read_outside_config() -> set[str]:
    trees = (ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py") if "config" not in path.parts[-2:-1])
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_every_setting_is_read_by_the_program():
    read = attributes_read_outside_config()
    every = [section for run in COMMANDS.values() for section in sections(run)]
    names = {f"{cls.__name__}.{setting.attribute}" for cls in every for setting in settings_of(cls)}
    assert not {name for name in names if name.partition(".")[2] not in read}


def test_every_setting_has_a_sentence_of_help():
    every = [section for run in COMMANDS.values() for section in sections(run) if section is not run]
    silent = [setting.name for cls in every for setting in settings_of(cls) if not setting.help]
    assert not silent
