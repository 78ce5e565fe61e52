"""`megarlhf COMMAND ...`: finds the command, runs it, and turns its errors into a list and an exit code.

Exit codes: 0 done, 1 failed, 2 bad settings or input, 75 saved and to be started again, 130 interrupted, 141 nobody
reads the output any more (`| head`).
"""

import contextlib
import difflib
import errno
import gc
import importlib
import logging
import os
import select
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from hashlib import blake2b

from megarlhf import __version__
from megarlhf.commands import command_summaries
from megarlhf.errors import ConfigError, MegarlhfError, Requeue
from megarlhf.launcher import is_launched, local_rank
from megarlhf.telemetry.status import BAD_INPUT, DONE, FAILED, INTERRUPTED, exit_code, reason

_PURPOSES = {
    "train, by a recipe": ("sft", "rm", "ppo", "grpo", "rloo", "reinforce-plus-plus", "dpo", "kto"),
    "before a run": ("show", "check", "plan", "doctor", "verify-layout"),
    "after a run": ("report", "compare", "replay"),
    "use a model": ("chat", "generate", "eval", "judge", "revise", "serve", "convert"),
    "your shell": ("completion",),
}
"""The order in which help lists the commands."""
OUTPUT_CLOSED = 141
_LEAVE_TOGETHER_S = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line (sys.argv when `argv` is None) and returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    logging.getLogger("megarlhf").setLevel(logging.INFO)
    for package in ("huggingface_hub", "datasets"):  # they print their messages themselves: once is enough
        logging.getLogger(package).propagate = False
    try:
        return _dispatch(words)
    except Requeue as error:
        _say_once(str(error))
        return exit_code(error)
    except MegarlhfError as error:
        if debug:
            traceback.print_exc()
        _print_error(error)
        return exit_code(error)
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        if not _output_is_closed():
            traceback.print_exc()
            return FAILED
        return OUTPUT_CLOSED
    except Exception:
        # Not one of ours: the traceback is the report.
        traceback.print_exc()
        return FAILED


def run() -> None:
    """`main` as a process: ends it with the exit code, at once.

    Process groups have threads, which after a failure wait for a lost peer; leaving them to the interpreter's end can
    take minutes, or abort with another code though all went well. A launcher kills all ranks when the first one ends:
    the moment before that lets what is wrong with settings or input be told (`_is_first_to_tell`), and told once.
    """
    code = main()
    if code == BAD_INPUT and is_launched():
        time.sleep(_LEAVE_TOGETHER_S)
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    _remove_temporary_folders()
    os._exit(code)


def _remove_temporary_folders() -> None:
    """What packages meant to keep until the interpreter's end: wandb, which megatron-core imports, makes two."""
    for found in [value for value in gc.get_objects() if type(value) is tempfile.TemporaryDirectory]:
        with contextlib.suppress(OSError):
            found.cleanup()


def _dispatch(words: list[str]) -> int:
    summaries = command_summaries()
    if words and words[0] == "--version":
        print(f"megarlhf {__version__}")
        return DONE
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help(summaries))
        return DONE if words else BAD_INPUT
    name = words[0].replace("_", "-").replace("++", "-plus-plus")
    if name not in summaries:
        typed = [_as_typed(name) for name in summaries]
        close = difflib.get_close_matches(words[0].replace("_", "-"), typed, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(typed)}"
        raise ConfigError(f"{words[0]}: no such command; {hint}")
    module = importlib.import_module(f"megarlhf.commands.{name.replace('-', '_')}")
    return module.main(words[1:])


def _as_typed(name: str) -> str:
    return name.replace("-plus-plus", "++")


def _help(summaries: dict[str, str]) -> str:
    width = max(map(len, summaries))
    left = [name for name in summaries if not any(name in names for names in _PURPOSES.values())]
    lines = []
    for purpose, names in (_PURPOSES | ({"more": tuple(left)} if left else {})).items():
        lines += ["", f"{purpose}:"]
        shown = [name for name in names if name in summaries]
        lines += [f"  {_as_typed(name):{width}}  {summaries[name].partition(': ')[0]}" for name in shown]
    return "\n".join(
        [
            "usage: megarlhf COMMAND ...",
            "       torchrun --nproc-per-node N -m megarlhf COMMAND ...    (several ranks)",
            *lines,
            "",
            "megarlhf COMMAND --help says how a command is called, with all its flags and what each does. --debug adds",
            "tracebacks to errors; --version. A first run: make quickstart, in the repository.",
        ]
    )


def _print_error(error: MegarlhfError) -> None:
    """What is wrong with settings or input, a line each, is mostly found by every rank, and other failures are often
    raised on all together: one rank of each machine says it."""
    if not _is_first_to_tell(reason(error)):
        return
    if exit_code(error) != BAD_INPUT:
        _say(reason(error))
    else:
        for line in reason(error).split("\n"):
            print(f"megarlhf: error: {line}", file=sys.stderr)


def _is_first_to_tell(text: str) -> bool:
    """No rank of this launch and machine has told this text; from now on this one has.

    Whichever comes first, as the first rank may still be starting. The name of a socket belongs to one process until
    that ends, and leaves no file. True without a launcher.
    """
    if not is_launched():
        return True
    digest = blake2b(f"{os.environ.get('MASTER_PORT')} {os.getppid()} {text}".encode(), digest_size=16).hexdigest()
    try:
        claim = socket.socket(socket.AF_UNIX)
        claim.bind(f"\0megarlhf-told-{digest}")
    except OSError as problem:
        return problem.errno != errno.EADDRINUSE and local_rank() == 0
    claim.detach()  # stays open until this process ends
    return True


def _output_is_closed() -> bool:
    """Whether the reader of this process's standard output has gone; else it was another pipe or connection."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _say_once(message: str) -> None:
    """By the first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"megarlhf: {message}", file=sys.stderr)


def _say(message: str) -> None:
    rank = os.environ.get("RANK")
    is_said = rank in (None, "0") or message.startswith("rank ")
    head = "megarlhf: error" if is_said else f"megarlhf: error on rank {rank}"
    print(f"{head}: {message}", file=sys.stderr)
