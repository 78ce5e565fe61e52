"""Finding a reward function by name, calling it under a time limit, and checking that it gave one number per response.

A reward function is `f(prompts, responses, metadata) -> list[float]`: three lists of one length (texts, texts, and the
metadata dictionaries of the prompts' file, with `id`), one number per response back. Raising is allowed: the run stops
with the traceback and the ids of the samples.
"""

import difflib
import importlib
import inspect
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence

import torch

from megarlhf.errors import ConfigError, RewardError
from megarlhf.rewards import builtin
from megarlhf.rewards.maths import maths

RewardFunction = Callable[[Sequence[str], Sequence[str], Sequence[dict]], Sequence[float]]

BUILTIN: dict[str, RewardFunction] = {
    "sentiment": builtin.sentiment,
    "length": builtin.length,
    "exact_match": builtin.exact_match,
    "pattern": builtin.pattern,
    "maths": maths,
}

WITH_ARGUMENT: dict[str, Callable[[str], RewardFunction]] = {
    "format": builtin.format_rule,
    "max_words": builtin.max_words_rule,
}
"""Makers of functions whose spec is NAME(ARGUMENT)."""

NEEDS = {"sentiment": "vaderSentiment"}
"""Packages that a builtin needs and megarlhf does not install. Each has the same name on PyPI."""


def resolve(spec: str) -> RewardFunction:
    """The reward function `spec`: one of BUILTIN, NAME(ARGUMENT) of WITH_ARGUMENT, or an importable `module:function`.

    Raises ConfigError when there is none, or when a package that it needs is missing.
    """
    name, bracket, rest = spec.partition("(")
    if bracket and name in WITH_ARGUMENT and rest.endswith(")"):
        return WITH_ARGUMENT[name](rest[:-1])
    if "," in spec:
        several = " ".join(re.findall(r"[^][, ]+", spec))
        raise ConfigError(f"reward.functions: {spec!r} is one word; give several as {several}, or in YAML as a list")
    if ":" in spec:
        return _plug_in(spec)
    if spec not in BUILTIN:
        known = [*BUILTIN, *(f"{name}(ARGUMENT)" for name in WITH_ARGUMENT)]
        close = difflib.get_close_matches(spec, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"reward.functions: no reward function is called {spec!r}; {hint}accepted: {', '.join(known)}, "
            "module:function for your own, or the http:// address of a server"
        )
    if spec in NEEDS:
        _require_package(spec, NEEDS[spec])
    return BUILTIN[spec]


def _require_package(spec: str, package: str) -> None:
    """Import what the function will import, so that it is missed before the run and not after the first rollouts."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"reward.functions: {spec} needs the package {package}, which is not installed; run: pip install {package}"
        ) from error


def _plug_in(spec: str) -> RewardFunction:
    module_name, _, function_name = spec.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # the `megarlhf` script, unlike `python -m`, does not look in the current folder
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the user's code; a script may end itself
        raise ConfigError(
            f"reward.functions: {spec!r}: importing {module_name!r} raised {type(error).__name__}: {error}; "
            "run from the folder that holds it, or put that folder on PYTHONPATH"
        ) from error
    function = vars(module).get(function_name)
    if not callable(function):
        raise ConfigError(f"reward.functions: {spec!r}: {module_name} has no function called {function_name!r}")
    _require_arguments(spec, function)
    return function


def _require_arguments(spec: str, function: Callable) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # one that is not written in Python may not say
        return
    try:
        signature.bind([], [], [])
    except TypeError as error:
        raise ConfigError(
            f"reward.functions: {spec!r}: takes {signature}, but is called as f(prompts, responses, metadata) "
            f"({error}); give it these three arguments, where metadata has each prompt's other columns"
        ) from error


def call_reward(
    function: RewardFunction,
    prompts: Sequence[str],
    responses: Sequence[str],
    metadata: Sequence[Mapping],
    timeout_s: float,
) -> torch.Tensor:
    """Scores [B] float32 of the B responses.

    Raises RewardError, naming the function and the samples, when it raises, takes longer than `timeout_s` seconds, or
    returns anything but B finite numbers.
    """
    name = _name_of(function)
    ids = [row.get("id", number) for number, row in enumerate(metadata)]
    result = _call(name, ids, function, (list(prompts), list(responses), [dict(row) for row in metadata]), timeout_s)
    return checked_scores(name, ids, result)


def _name_of(function: RewardFunction) -> str:
    """`module:name`; of an object that is called, its class's."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def _call(name: str, ids: list, function: RewardFunction, arguments: tuple, timeout_s: float) -> object:
    """What the function returns. It runs in a daemon thread: a hanging one cannot keep the process alive."""
    outcome: dict[str, object] = {}

    def run() -> None:
        try:
            outcome["result"] = function(*arguments)
        except BaseException as error:  # also SystemExit: it would end this thread only, without a word
            outcome["error"] = error

    thread = threading.Thread(target=run, name=f"reward {name}", daemon=True)
    thread.start()
    thread.join(min(timeout_s, threading.TIMEOUT_MAX))
    if thread.is_alive():
        raise RewardError(
            f"reward function {name} did not return within reward.timeout_s {timeout_s:g} s ({_samples(ids)}); "
            "make it faster or raise the limit"
        )
    error = outcome.get("error")
    if isinstance(error, RewardError):
        raise error
    if isinstance(error, BaseException):
        text = "".join(traceback.format_exception(error)).rstrip()
        raise RewardError(f"reward function {name} raised {type(error).__name__} ({_samples(ids)}):\n{text}") from error
    return outcome["result"]


def checked_scores(name: str, ids: list, result: object) -> torch.Tensor:
    """The result as [B] float32; half-precision tensors, booleans and whole numbers are promoted."""
    if isinstance(result, dict):
        raise RewardError(
            f"reward function {name} returned a dict with keys {sorted(result)}; return a list of numbers"
        )
    values = result.tolist() if hasattr(result, "tolist") else result  # tensors and arrays, from whatever device
    if not isinstance(values, list | tuple):
        raise RewardError(f"reward function {name} returned {_described(result)}; return a list of {len(ids)} numbers")
    if len(values) != len(ids):
        raise RewardError(
            f"reward function {name} returned {len(values)} values for {len(ids)} responses; return one for each"
        )
    return torch.tensor([_number(name, ids[i], value) for i, value in enumerate(values)], dtype=torch.float32)


def _number(name: str, sample_id: object, value: object) -> float:
    if hasattr(value, "tolist"):  # a scalar tensor or numpy number inside a list
        value = value.tolist()
    if not isinstance(value, int | float):
        raise RewardError(
            f"reward function {name} returned {_described(value)} for sample {sample_id!r}; return a number"
        )
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond all floats
        number = float("inf")
    if number != number or number in (float("inf"), float("-inf")):
        raise RewardError(f"reward function {name} returned {number} for sample {sample_id!r}; return finite numbers")
    return number


def _described(value: object) -> str:
    keys = f" with keys {sorted(value)}" if isinstance(value, dict) else ""
    return "None" if value is None else f"a {type(value).__name__}{keys}"


def _samples(ids: list) -> str:
    shown = ", ".join(repr(i) for i in ids[:8])
    return f"samples {shown}{f' and {len(ids) - 8} more' if len(ids) > 8 else ''}"
