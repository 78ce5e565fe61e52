"""`megarlhf completion`: a script that teaches a shell this program's commands, flags and the values they take.

The script is complete in itself, so that a key press does not start Python. Settings come from their classes, the flags
of other commands from their own help.
"""

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from io import StringIO
from itertools import chain
from typing import Literal, get_args, get_origin

from megarlhf.commands import command_summaries
from megarlhf.commands.convert import TOOLS
from megarlhf.config.command import OWN_FLAGS
from megarlhf.config.fields import settings_of
from megarlhf.config.flags import Parser
from megarlhf.config.runs import COMMANDS

SUMMARY = "print a shell's completion script: source <(megarlhf completion bash)"

_FLAG = re.compile(r"^[│\s]*(?:-\w(?: \w+)?, )?(--[a-z][\w.-]*)(?: \{([^}]*)\})?", re.MULTILINE)
_OF_A_RECIPE = ("check", "plan", "show", "verify-layout")
"""Commands whose next word may be a training command, whose settings they then take."""


@dataclass(frozen=True)
class Words:
    """What may follow a command."""

    flags: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """With the values of those that take one of a few."""
    commands: tuple[str, ...] = ()
    """What may be its first word, beside a path."""
    paths: Literal["files", "folders", "none"] = "files"
    """What its words may be that follow no flag."""


def main(argv: Sequence[str]) -> int:
    """Prints the script."""
    parser = Parser(
        prog="megarlhf completion",
        description="Prints a script for one shell. To have it at every start, add the line to the shell's own file.",
        epilog="bash (~/.bashrc): source <(megarlhf completion bash)   zsh (~/.zshrc, after compinit): source "
        "<(megarlhf completion zsh)   fish: megarlhf completion fish > ~/.config/fish/completions/megarlhf.fish",
    )
    parser.add_argument("shell", choices=_SCRIPTS, help="whose script")
    words = parser.parse_args(argv)
    print(_SCRIPTS[words.shell](vocabulary()))
    return 0


def vocabulary() -> dict[str, Words]:
    """What may follow each command, by its name: `ppo`, `convert inspect`."""
    found = {}
    for name, summary in command_summaries().items():
        typed = name.replace("-plus-plus", "++")
        if typed in COMMANDS:
            found[typed] = Words(_settings(COMMANDS[typed]) | dict.fromkeys(OWN_FLAGS, ()))
        elif name not in ("completion", "convert"):
            nested = tuple(COMMANDS) if name in _OF_A_RECIPE else ()
            takes_folder = f"megarlhf {name} MODEL_DIR" in summary or f"megarlhf {name} RUN_DIR" in summary
            found[typed] = Words(_in_help([name, "--help"]), nested, "folders" if takes_folder else "files")
    for tool in TOOLS:
        found[f"convert {tool}"] = Words(_in_help(["convert", tool, "--help"]), paths="folders")
    for name, words in {"convert": TOOLS, "completion": tuple(_SCRIPTS)}.items():
        found[name] = Words(_in_help([name, "--help"]), words, "none")
    return {name: replace(words, flags=words.flags | {"--help": ()}) for name, words in found.items()}


def _settings(cls: type, prefix: str = "--") -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for setting in settings_of(cls):
        if setting.is_section:
            found |= _settings(setting.kind, f"{prefix}{setting.name}.")
        else:
            is_choice = get_origin(setting.kind) is Literal
            values = get_args(setting.kind) if is_choice else ("true", "false") if setting.kind is bool else ()
            found[prefix + setting.name] = values
    return found


def _in_help(words: list[str]) -> dict[str, tuple[str, ...]]:
    """The flags that a command's help lists, one at the beginning of a line each."""
    module = importlib.import_module(f"megarlhf.commands.{words[0].replace('-', '_')}")
    shown = StringIO()
    with redirect_stdout(shown), suppress(SystemExit):
        module.main(words[1:])
    return {flag: tuple(filter(None, values.split(","))) for flag, values in _FLAG.findall(shown.getvalue())}


def _cases(function: str, answers: Mapping[str, Sequence[str]]) -> str:
    """A shell function (of bash and zsh) that prints the words for what it is given."""
    by_words: dict[tuple[str, ...], list[str]] = {}
    for key, words in answers.items():
        if words:
            by_words.setdefault(tuple(words), []).append(key)
    heads = {words: "|".join(f'"{key}"' for key in keys) for words, keys in by_words.items()}
    lines = [f'  {head}) echo "{" ".join(words)}" ;;' for words, head in heads.items()]
    return "\n".join([f'{function}() {{ case "$1" in', *lines, "esac; }"])


def _functions(found: dict[str, Words]) -> str:
    values = {f"{name} {flag}": values for name, words in found.items() for flag, values in words.flags.items()}
    return "\n".join(
        [
            _cases("_megarlhf_flags", {name: sorted(words.flags) for name, words in found.items()}),
            _cases("_megarlhf_values", values),
            _cases("_megarlhf_words", {"": _first(found)} | {name: words.commands for name, words in found.items()}),
            _cases("_megarlhf_paths", {name: (words.paths,) for name, words in found.items()}),
            _SHARED,
        ]
    )


_SHARED = """# $1 is the command, $2 the next word (perhaps a tool or a training command), $3 the word before, or a flag
_megarlhf_flags_of() {
  {
    _megarlhf_flags "$1"
    _megarlhf_flags "$1 $2"
    case " $(_megarlhf_words "$1") " in *" $2 "*) _megarlhf_flags "$2" ;; esac
  } | tr " " "\n" | sort -u
}
_megarlhf_values_of() {
  _megarlhf_values "$1 $3"
  _megarlhf_values "$1 $2 $3"
  case " $(_megarlhf_words "$1") " in *" $2 "*) _megarlhf_values "$2 $3" ;; esac
}
_megarlhf_paths_of() {
  case "$3" in -*) echo files; return ;; esac
  local paths="$(_megarlhf_paths "$1 $2")"
  if [ -n "$paths" ]; then echo "$paths"; else _megarlhf_paths "$1"; fi
}"""


def _first(found: dict[str, Words]) -> list[str]:
    return sorted(name for name in found if " " not in name)


def _bash(found: dict[str, Words]) -> str:
    return f"""# megarlhf's completion for bash: source <(megarlhf completion bash)
{_functions(found)}
_megarlhf() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
  local name="${{COMP_WORDS[1]}}" second="${{COMP_WORDS[2]}}" values
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "$(_megarlhf_words "")" -- "$current")); return
  fi
  values="$(_megarlhf_values_of "$name" "$second" "$before")"
  if [ -n "$values" ]; then
    COMPREPLY=($(compgen -W "$values" -- "$current"))
  elif [[ "$current" == -* ]]; then
    COMPREPLY=($(compgen -W "$(_megarlhf_flags_of "$name" "$second")" -- "$current"))
  else
    [ "$COMP_CWORD" -eq 2 ] && COMPREPLY=($(compgen -W "$(_megarlhf_words "$name")" -- "$current"))
    case "$(_megarlhf_paths_of "$name" "$second" "$before")" in
      files) COMPREPLY+=($(compgen -f -- "$current")) ;;
      folders) COMPREPLY+=($(compgen -d -- "$current")) ;;
    esac
  fi
}}
complete -o filenames -F _megarlhf megarlhf"""


def _zsh(found: dict[str, Words]) -> str:
    return f"""#compdef megarlhf
# megarlhf's completion for zsh, after compinit: source <(megarlhf completion zsh)
{_functions(found)}
_megarlhf() {{
  local name="${{words[2]}}" second="${{words[3]}}" values
  if (( CURRENT == 2 )); then
    compadd -- ${{=$(_megarlhf_words "")}}; return
  fi
  values="$(_megarlhf_values_of "$name" "$second" "${{words[CURRENT-1]}}")"
  if [[ -n "$values" ]]; then
    compadd -- ${{=values}}
  elif [[ "$PREFIX" == -* ]]; then
    compadd -- ${{=$(_megarlhf_flags_of "$name" "$second")}}
  else
    (( CURRENT == 3 )) && compadd -- ${{=$(_megarlhf_words "$name")}}
    case "$(_megarlhf_paths_of "$name" "$second" "${{words[CURRENT-1]}}")" in
      files) _files ;;
      folders) _files -/ ;;
    esac
  fi
}}
compdef _megarlhf megarlhf"""


def _fish(found: dict[str, Words]) -> str:
    summaries = {name.replace("-plus-plus", "++"): line for name, line in command_summaries().items()}
    lines = ["# megarlhf's completion for fish: > ~/.config/fish/completions/megarlhf.fish"]
    for name in _first(found):
        what = summaries[name].partition(": ")[0].replace("'", "\\'")
        lines.append(f"complete -c megarlhf -n __fish_use_subcommand -a '{name}' -d '{what}'")
    for name, words in found.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {part}" for part in name.split())
        lines += [f"complete -c megarlhf -n '{seen}' -a '{' '.join(words.commands)}'"] if words.commands else []
        if words.paths == "none":
            lines.append(f"complete -c megarlhf -n '{seen}' -f")
        elif words.paths == "folders":
            lines.append(f"complete -c megarlhf -n '{seen}' -a '(__fish_complete_directories)'")
        for flag, values in words.flags.items():
            choices = f" -x -a '{' '.join(values)}'" if values else ""
            lines.append(f"complete -c megarlhf -n '{seen}' -l {flag[2:]}{choices}")
    return "\n".join(chain(lines))


_SCRIPTS: dict[str, Callable[[dict[str, Words]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
