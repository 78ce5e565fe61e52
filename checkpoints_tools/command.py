"""What all commands share: their arguments, and errors that become one message and an exit code.

Exit codes: 0 done, 1 failed (or `compare` found a difference), 2 bad input, 130 interrupted. A module here imports
torch only once it is needed, so that `--help` is quick and workers start early.
"""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING

from megarlhf.config.flags import Parser
from megarlhf.config.layout import Layout
from megarlhf.errors import ConfigError, MegarlhfError
from megarlhf.telemetry.status import BAD_INPUT as BAD_INPUT
from megarlhf.telemetry.status import DONE as DONE
from megarlhf.telemetry.status import FAILED, exit_code
from megarlhf.weights.heap import give_back_freed_memory

if TYPE_CHECKING:
    import torch

INTERRUPTED = 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
_PRELOADED = "megarlhf.weights.convert"
_SMALL_BYTES = 2**29
"""A smaller model is written before other processes have started."""
_MAX_WORKERS = 4
"""By default: a disk is not faster for more."""


def parser(tool: str, description: str) -> argparse.ArgumentParser:
    """A parser whose help opens with the idea of the tool, which is a name as `megarlhf convert` knows it."""
    return Parser(prog=f"megarlhf convert {tool}", description=description.strip().splitlines()[0])


def positive(text: str) -> int:
    """A whole number above 0, as an argument's type."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return number


def add_conversion(arguments: argparse.ArgumentParser) -> None:
    """SRC DST --config --workers --without-tokenizer --dtype."""
    arguments.add_argument("source", metavar="SRC", help="folder to read")
    arguments.add_argument("target", metavar="DST", help="folder to write; must not be there yet")
    add_config(arguments)
    arguments.add_argument(
        "--workers", type=positive, help="processes (by default one a processor, at most 4; 1 for a small model)"
    )
    arguments.add_argument("--without-tokenizer", action="store_true", help="convert though SRC has no tokenizer")
    arguments.add_argument("--dtype", choices=DTYPES, help="cast weights (by default they stay as they are)")


def start_workers(arguments: argparse.Namespace) -> int:
    """How many processes are to write. What they load is loaded from now on, while this process does the same."""
    source = Path(arguments.source)
    num_bytes = sum(file.stat().st_size for file in source.iterdir() if file.is_file()) if source.is_dir() else 0
    usual = 1 if num_bytes < _SMALL_BYTES else min(len(os.sched_getaffinity(0)), _MAX_WORKERS)
    workers = arguments.workers or usual
    give_back_freed_memory()
    if workers > 1:
        forkserver.set_forkserver_preload([_PRELOADED])
        forkserver.ensure_running()
    return workers


def dtype_of(name: str | None) -> "torch.dtype | None":
    """The type that --dtype names."""
    import torch

    return None if name is None else getattr(torch, DTYPES[name])


def add_config(arguments: argparse.ArgumentParser, flag: str = "--config") -> None:
    """The folder with a config.json."""
    arguments.add_argument(flag, metavar="FOLDER", help="folder with config.json, for a checkpoint that has none")


def add_layout(arguments: argparse.ArgumentParser) -> None:
    """--tp --pp --vp."""
    for name, words in (("tp", "tensor ranks"), ("pp", "pipeline ranks"), ("vp", "virtual stages a pipeline rank")):
        arguments.add_argument(f"--{name}", type=positive, default=1, help=f"{words} to cut blocks and files for")


def layout(arguments: argparse.Namespace) -> Layout:
    """The layout that --tp, --pp and --vp say. Raises ConfigError for virtual stages of a single one."""
    if arguments.vp > 1 and arguments.pp == 1:
        raise ConfigError(
            f"--vp {arguments.vp}: virtual stages are pieces of a pipeline rank, and --pp is 1; give --pp 2 or more, "
            "or leave --vp out"
        )
    return Layout(tp=arguments.tp, pp=arguments.pp, vp=arguments.vp)


def run(main: Callable[[Sequence[str] | None], int]) -> None:
    """Run a command as a process."""
    sys.exit(guarded(main, None))


def guarded(main: Callable[[Sequence[str] | None], int], words: Sequence[str] | None) -> int:
    """The exit code of a command; its errors go to standard error, a line each."""
    try:
        return main(words)
    except KeyboardInterrupt:
        print("megarlhf: interrupted; the same command again goes on from here", file=sys.stderr)
        return INTERRUPTED
    except MegarlhfError as error:
        print(f"megarlhf: error: {error}", file=sys.stderr)
        return exit_code(error)
    except OSError as error:
        move = "; the unfinished folder is removed: make room or choose another disk" if error.errno in _FULL else ""
        print(f"megarlhf: error: {error}{move}", file=sys.stderr)
        return FAILED
