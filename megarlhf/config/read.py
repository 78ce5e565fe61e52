"""YAML text into sections that remember their lines, so that a message can say FILE:LINE."""

from pathlib import Path

import yaml

from megarlhf.errors import ConfigError

_HINTS = {
    "<block end>": "the line is not indented as those above it; give all keys of a section the same indentation",
    "mapping values are not allowed": "indent the line as those above it, or put a value that holds ': ' in quotes",
    "could not find expected ':'": "write KEY: VALUE, with a blank after the colon",
    "'\\t'": "indent with blanks, not with tabs",
}
"""What is mostly behind the words of the YAML package."""


class Section(dict):
    """A YAML mapping, with the line of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}


class _Loader(yaml.SafeLoader):
    """The safe loader, except that mappings become `Section`s and a key given twice is noted in `duplicates`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.duplicates: list[tuple[int, str, int]] = []

    def section(self, node: yaml.MappingNode):
        """Build a Section in two steps, as PyYAML asks of containers that may be referred to by an anchor."""
        section = Section()
        yield section
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in seen:
                self.duplicates.append((line, key, seen[key]))
            seen[key] = line
        section.lines = seen
        section.update(self.construct_mapping(node, deep=True))


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.section)


def read_yaml(path: str | Path) -> tuple[Section, list[str]]:
    """The file's sections and one sentence per duplicate key. Raises ConfigError when it is not a YAML mapping."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error}") from error
    return parse_yaml(text, path)


def parse_yaml(text: str, path: str | Path) -> tuple[Section, list[str]]:
    """Like `read_yaml`, from a text; `path` only names it in messages."""
    try:
        loader = _Loader(text)
        data = loader.get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: 2024-99-99 is the text of no date
        raise ConfigError(_syntax_error(error, path)) from error
    data = Section() if data is None else data
    if not isinstance(data, Section):
        raise ConfigError(f"{path}: expected sections such as `actor:`, found {type(data).__name__} {data!r}")
    return data, [
        f"{path}:{line}: {key}: given twice, first in line {first}; remove one"
        for line, key, first in loader.duplicates
    ]


def _syntax_error(error: Exception, path: str | Path) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"{path}: not valid YAML: {error}"
    mark = error.problem_mark
    problem = error.problem or error.context or ""
    hint = "".join(f"; {move}" for words, move in _HINTS.items() if words in problem)
    return f"{path}:{mark.line + 1}: not valid YAML, column {mark.column + 1}: {problem}{hint}"
