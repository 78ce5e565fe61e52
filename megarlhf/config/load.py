"""YAML files, then dotted flags on top of them, become frozen settings; everything that is wrong is told at once.

    settings = load(PPORun, "recipe.yaml", ["--actor.optimizer.learning_rate", "1e-6"])

Sections are merged over the defaults, and over those of earlier files, key by key. Numbers in scientific notation are
floats however YAML reads them.
"""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml

from megarlhf.config.fields import Setting, accepted, settings_of
from megarlhf.config.flags import FlagText, parse_flags
from megarlhf.config.read import Section, read_yaml
from megarlhf.config.suggestions import suggestion
from megarlhf.errors import ConfigError

T = TypeVar("T")
Files = str | Path | Sequence[str | Path] | None
"""One YAML file, several of which later ones win, or none."""
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")


class _Rejected(Exception):
    """A value that a setting does not take; the text says what was found."""


def load(cls: type[T], files: Files, argv: Sequence[str], prog: str = "megarlhf") -> T:
    """Settings of class `cls` from files (or None: only defaults) and flags.

    `--help` prints every setting with its value and exits. Raises ConfigError with every violation found.
    """
    settings, violations = load_leniently(cls, files, argv, prog)
    if violations:
        raise ConfigError(violations)
    return settings


def load_leniently(
    cls: type[T], files: Files, argv: Sequence[str], prog: str = "megarlhf", own_flags: Collection[str] = ()
) -> tuple[T, list[str]]:
    """Like `load`, but what cannot be used is left at its default and told. Raises ConfigError for a broken file.

    `own_flags` of the command that are no settings may be what a mistyped flag was meant to be.
    """
    violations: list[str] = []
    settings = cls()
    for path in [files] if isinstance(files, str | Path) else files or ():
        section, duplicates = read_yaml(path)
        violations += duplicates
        settings = _fill(cls, settings, section, _Place(cls, str(path)), violations)
    flags, unknown = parse_flags(settings, argv, prog)
    violations += [_unknown_flag(cls, flag, own_flags) for flag in unknown]
    return _fill(cls, settings, flags, _Place(cls), violations), violations


def load_command(cls: type[T], argv: Sequence[str], prog: str) -> T:
    """Settings of a command called as `FILE.yaml ... [--dotted.flags]`; files may be left out. Raises ConfigError."""
    return load(cls, *files_and_flags(argv), prog)


def files_and_flags(argv: Sequence[str]) -> tuple[tuple[str, ...], Sequence[str]]:
    """The YAML files that open a command's words, and the flags. The first may have any name, further ones end in .yaml
    or .yml."""
    number = 0 if not argv or argv[0].startswith("-") else 1
    while 0 < number < len(argv) and not argv[number].startswith("-") and argv[number].endswith((".yaml", ".yml")):
        number += 1
    return tuple(argv[:number]), argv[number:]


def to_dict(settings: Any) -> dict[str, Any]:
    """Plain dicts, lists and scalars under the names a user types."""
    result: dict[str, Any] = {}
    cls: type = type(settings)
    for setting in settings_of(cls):
        value = _attribute(settings, setting)
        if setting.is_section and value is not None:
            value = to_dict(value)
        result[setting.name] = list(value) if isinstance(value, tuple) else value
    return result


def to_yaml(settings: Any) -> str:
    """YAML that `load` turns into equal settings."""
    return yaml.dump(to_dict(settings), Dumper=_Exact, sort_keys=False, allow_unicode=True, width=120)


class _Exact(yaml.SafeDumper):
    """Writes texts so that they are read back as they are."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # PyYAML takes these for line breaks and reads them back as spaces, unless they are escaped in double quotes.
    style = '"' if set(value) & set("\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Exact.add_representer(str, _text)


class _Place:
    """Where in the settings we are: says so at the head of every message."""

    def __init__(self, root: type, path: str = "", prefix: str = "") -> None:
        self.root, self.path, self.prefix = root, path, prefix

    def inside(self, name: str) -> "_Place":
        return _Place(self.root, self.path, f"{self.prefix}{name}.")

    def head(self, key: str, section: dict) -> str:
        """`FILE:LINE: actor.model` for a key of a file, `--actor.model` for a flag."""
        if not isinstance(section, Section):
            return f"--{self.prefix}{key}"
        line = section.lines.get(key)
        return f"{self.path}:{line}: {self.prefix}{key}" if line else f"{self.path}: {self.prefix}{key}"


def _fill(cls: type, base: Any, section: dict, place: _Place, violations: list[str]) -> Any:
    """`base` with the values of `section` laid over it; what cannot be used is left out and added to `violations`."""
    known = {setting.name: setting for setting in settings_of(cls)}
    changes = {}
    for key, value in section.items():
        head = place.head(key, section)
        if key not in known:
            violations.append(f"{head}: no such setting; {suggestion(str(key), place.prefix, place.root)}")
            continue
        setting = known[key]
        try:
            if isinstance(value, dict) and setting.is_section:
                below = setting.section_base(_attribute(base, setting))
                changes[setting.attribute] = _fill(setting.kind, below, value, place.inside(key), violations)
            else:
                changes[setting.attribute] = _value(setting, value)
        except _Rejected as found:
            violations.append(f"{head}: expected {accepted(setting)}, found {found}")
    return replace(base, **changes)


def _attribute(settings: Any, setting: Setting) -> Any:
    return vars(settings)[setting.attribute]


def _value(setting: Setting, value: Any) -> Any:
    if isinstance(value, FlagText) and value.words is not None:
        return _from_words(setting, value.words)
    if value is None:
        if setting.is_section and not setting.optional:
            return setting.default
        if setting.optional:
            return None
        raise _Rejected("null; leave the key out for the default")
    return _typed(setting.kind, value)


def _from_words(setting: Setting, words: tuple[str, ...]) -> Any:
    """The value of a flag: all words for a list, one word otherwise, none only for `true`.

    A list of numbers may also be one word in YAML's brackets; a text in brackets stays a text.
    """
    if setting.optional and words in (("null",), ("None",)):
        return None
    if get_origin(setting.kind) is tuple:
        item = get_args(setting.kind)[0]
        brackets = re.fullmatch(r"\[(.*)\]", words[0]) if item is not str and len(words) == 1 else None
        try:
            return tuple(
                _from_word(item, word) for word in (re.findall(r"[^\s,]+", brackets[1]) if brackets else words)
            )
        except _Rejected as found:
            raise _Rejected(f"{found}; put blanks between several, as in 1 2") from None
    if setting.kind is bool and not words:
        return True
    if len(words) != 1:
        raise _Rejected("nothing" if not words else f"{len(words)} words: {' '.join(words)}")
    return _from_word(setting.kind, words[0])


def _from_word(kind: Any, word: str) -> Any:
    if kind is bool and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if kind is int and re.fullmatch(r"[-+]?\d[\d_]*", word):
        return int(word)
    return _typed(kind, word)


def _typed(kind: Any, value: Any) -> Any:
    if get_origin(kind) is Literal:
        if value in get_args(kind) and isinstance(value, str):
            return value
        raise _Rejected(_found(value))
    if get_origin(kind) is tuple:
        if isinstance(value, list):
            return tuple(_typed(get_args(kind)[0], item) for item in value)
        raise _Rejected(f"{_found(value)}; write [{value}]")
    if kind is float:
        return _float(value)
    if kind in (bool, int, str) and type(value) is kind:
        return value
    raise _Rejected(_found(value) + _hint(kind, value))


def _float(value: Any) -> float:
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Rejected(_found(value))
    if not math.isfinite(value):
        raise _Rejected(f"{value}, which is not finite")
    return float(value)


def _found(value: Any) -> str:
    words = {str: "text", bool: "true/false", int: "whole number", float: "number", list: "list"}
    if isinstance(value, dict):
        return "a section"
    return f"{words.get(type(value), type(value).__name__)} {value!r}"


def _hint(kind: Any, value: Any) -> str:
    if kind is str and isinstance(value, int | float):
        return "; put it in quotes"
    if kind is int and not isinstance(value, bool | list | dict):
        number = float(value) if isinstance(value, float) or _NUMBER.fullmatch(str(value)) else math.nan
        return f"; write {int(number)}" if math.isfinite(number) and number == int(number) else ""
    return ""


def _unknown_flag(cls: type, flag: str, own_flags: Collection[str]) -> str:
    if not flag.startswith("--"):
        return f"{flag!r}: expected a flag such as --run.steps; YAML files come first"
    name = flag[2:]
    prefix, _, key = name.rpartition(".")
    return f"--{name}: no such setting; {suggestion(key, f'{prefix}.' if prefix else '', cls, own_flags)}"
