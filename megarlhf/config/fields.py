"""What a settings class says about itself: names as typed, types, help texts, defaults."""

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Setting:
    """One field of a settings class."""

    attribute: str
    """The field's name in Python."""
    name: str
    """As typed in YAML and flags: `lambda_` is `lambda`."""
    kind: Any
    """The type without None."""
    optional: bool
    """None is accepted."""
    help: str
    """The string below the field."""
    default: Any
    """Value when nothing is set."""

    @property
    def is_section(self) -> bool:
        """It holds settings of its own."""
        return is_dataclass(self.kind)

    def section_base(self, value: Any) -> Any:
        """What a partly filled section is laid over: the present value, or its own defaults for None."""
        return self.kind() if value is None else value


@cache
def settings_of(cls: type) -> tuple[Setting, ...]:
    """The settings of a dataclass in the order they are written."""
    hints, helps = get_type_hints(cls), _help_texts(cls)
    return tuple(
        Setting(f.name, f.name.removesuffix("_"), *_without_none(hints[f.name]), helps.get(f.name, ""), _default(f))
        for f in fields(cls)
    )


def dotted_names(cls: type, prefix: str = "") -> Iterator[str]:
    """Every setting's full name, sections before what they hold."""
    for setting in settings_of(cls):
        yield prefix + setting.name
        if setting.is_section:
            yield from dotted_names(setting.kind, f"{prefix}{setting.name}.")


def accepted(setting: Setting) -> str:
    """In words, what a setting takes."""
    words = _accepted_kind(setting.kind)
    return f"{words} or null" if setting.optional else words


def _accepted_kind(kind: Any) -> str:
    if is_dataclass(kind):
        sections = settings_of(kind)  # type: ignore[arg-type]  # mypy takes classes of dataclasses for not hashable
        return "a section with " + ", ".join(setting.name for setting in sections)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return {str: "a list of texts", float: "a list of numbers", int: "a list of whole numbers"}[get_args(kind)[0]]
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[kind]


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    kinds = [kind for kind in get_args(hint) if kind is not types.NoneType]
    assert len(kinds) == 1, f"a setting has one type, perhaps with None; found {hint}"
    return kinds[0], True


def _default(field: Any) -> Any:
    assert field.default is not MISSING or field.default_factory is not MISSING, f"setting {field.name} needs a default"
    return field.default_factory() if field.default is MISSING else field.default


def _help_texts(cls: type) -> dict[str, str]:
    """The string that follows each field in the source: Python keeps no docstring for a field.

    A field that is inherited keeps its text, one that is declared anew brings its own.
    """
    found: dict[str, str] = {}
    for ancestor in reversed(cls.__mro__):
        found |= _help_in_source(ancestor) if is_dataclass(ancestor) else {}
    return found


def _help_in_source(cls: type) -> dict[str, str]:
    (written,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(written, ast.ClassDef)
    pairs = zip(written.body, written.body[1:], strict=False)
    return {
        statement.target.id: " ".join(following.value.value.split())
        for statement, following in pairs
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
        and isinstance(following.value.value, str)
    }
