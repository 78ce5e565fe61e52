"""Dotted flags, parsed by tyro against a mirror of the settings in which every value is still the text that was typed.

Keeping the text lets YAML and flags share one set of rules and one list of errors (see `load.py`), and lets a flag such
as `--critic.train.tp 2` fill a section that is null by default.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from megarlhf.config.fields import Setting, settings_of


@dataclass(frozen=True)
class FlagText:
    """The words after a flag; None where the flag was not given."""

    words: tuple[str, ...] | None = None


def parse_flags(settings: Any, argv: Sequence[str], prog: str) -> tuple[dict, list[str]]:
    """What the flags set, as nested dicts of FlagText, and words that are no flag of ours. Help shows `settings`."""
    if not argv:
        return {}, []
    import tyro  # here, so that runs without flags do without it

    mirror = _mirror(type(settings), settings)
    filled, unknown = tyro.cli(
        mirror, prog=prog, args=list(argv), return_unknown_args=True, use_underscores=True,
        description=f"Settings of `{prog}`, each with its present value.",
    )  # fmt: skip
    return _given(filled, type(settings)), _flags_only(unknown)


def spelled(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """The words, those of `flags` among them as they are written there: `-` and `_` are the same to whoever types."""
    written = {flag.replace("_", "-"): flag for flag in flags}
    result = []
    for word in words:
        flag, equals, value = word.partition("=")
        as_written = written.get(flag.replace("_", "-"), flag) if word.startswith("--") else flag
        result.append(f"{as_written}{equals}{value}")
    return result


class Parser(ArgumentParser):
    """For commands without settings; takes flags in either spelling, as all commands do."""

    def parse_known_args(self, args=None, namespace=None):
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args(spelled(words, self._option_string_actions), namespace)


def divided(words: Sequence[str], options: type) -> tuple[list[str], list[str], list[str]]:
    """(words before the first flag, flags of the dataclass `options` with their values, other flags with theirs).

    For commands that have flags beside those of a recipe. Help is asked of the command.
    """
    names = {f"--{one.name}" for one in fields(options)}
    first: list[str] = []
    own: list[str] = []
    others: list[str] = []
    place = first
    for word in spelled(words, names):
        if word in ("-h", "--help"):
            own.append(word)
            continue
        if word.startswith("--"):
            place = own if word.partition("=")[0] in names else others
        place.append(word)
    return first, own, others


def _mirror(cls: type, settings: Any) -> type:
    columns = []
    for setting in settings_of(cls):
        value = vars(settings)[setting.attribute]
        if setting.is_section:
            section = _mirror(setting.kind, setting.section_base(value))
            columns.append((setting.attribute, section, field(default_factory=section)))
        else:
            columns.append((setting.attribute, _text_of(setting, value), field(default=FlagText())))
    mirror = make_dataclass(cls.__name__, columns, frozen=True)
    mirror.__doc__ = cls.__doc__
    return mirror


def _text_of(setting: Setting, value: Any) -> Any:
    from tyro.conf import arg
    from tyro.constructors import PrimitiveConstructorSpec

    spec = PrimitiveConstructorSpec(
        nargs="*",
        metavar=_metavar(setting.kind),
        instance_from_str=lambda words: FlagText(tuple(words)),
        is_instance=lambda instance: isinstance(instance, FlagText),
        str_from_instance=lambda instance: list(instance.words or ()),
    )
    hint = f"(now: {_shown(value)})"
    return Annotated[FlagText, spec, arg(name=setting.name, help=setting.help, help_behavior_hint=hint)]


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    if value in ("", None):
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if get_origin(kind) is tuple:
        return f"[{_metavar(get_args(kind)[0])} ...]"
    return {bool: "{true,false}", int: "INT", float: "FLOAT", str: "TEXT"}[kind]


def _given(mirror: Any, cls: type) -> dict:
    """Only what was typed, under the names that were typed."""
    result = {}
    names = {setting.attribute: setting.name for setting in settings_of(cls)}
    kinds = {setting.attribute: setting.kind for setting in settings_of(cls)}
    for column in fields(mirror):
        value = vars(mirror)[column.name]
        if is_dataclass(kinds[column.name]):
            below = _given(value, kinds[column.name])
            if below:
                result[names[column.name]] = below
        elif value.words is not None:
            result[names[column.name]] = value
    return result


def _flags_only(unknown: Sequence[str]) -> list[str]:
    """Unknown flags without their values; words that follow no flag stay."""
    flags: list[str] = []
    for word in unknown:
        if word.startswith("--"):
            flags.append(word.partition("=")[0])
        elif not flags:
            flags.append(word)
    return flags
