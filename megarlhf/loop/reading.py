"""How each command reads its data sets, and what is wrong with their rows."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megarlhf.config.corpus import Corpus
from megarlhf.config.runs import AnyRun, DPORun, KTORun, OfflineRun, OnlineRun, PPORun, RewardModelRun
from megarlhf.data.batches import MaskRule
from megarlhf.data.corpus import (
    attributes_reader,
    read_demonstrations,
    read_labelled,
    read_margins,
    read_preferences,
    read_scored,
)  # fmt: skip
from megarlhf.data.examples import Example
from megarlhf.data.files import HUB
from megarlhf.data.prompts import read_prompts
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.errors import MegarlhfError
from megarlhf.loop.first_look import data_sets
from megarlhf.loop.roles import roles
from megarlhf.records.prompts import Prompt

_log = logging.getLogger(__name__)

Reader = Callable[[Corpus, Tokenizer, str], list[Example]]


@dataclass(frozen=True)
class Reading:
    """How a command reads its data set: the rows it accepts, and the tokens it learns from."""

    read: Reader
    mask: MaskRule


def reading(settings: OfflineRun) -> Reading:
    """Demonstrations, preferences, judged or scored answers, by what the command learns from."""
    if isinstance(settings, RewardModelRun):
        how = settings.algorithm
        if how.attributes:
            return Reading(attributes_reader(how.attributes), how.read_at)
        comparisons = read_margins if how.margins else read_preferences
        return Reading(read_scored if how.loss == "regression" else comparisons, how.read_at)
    if isinstance(settings, DPORun):
        return Reading(read_preferences, "response")
    return Reading(read_labelled if isinstance(settings, KTORun) else read_demonstrations, "response")


def read_measured(settings: RewardModelRun, tokenizer: Tokenizer) -> list[Example]:
    """The examples of statistics.path. Raises DataError."""
    how = reading(settings)
    read = read_preferences if how.read is read_margins else how.read  # a margin changes no score
    return read(replace(settings.data, path=settings.statistics.path), tokenizer, "statistics")


def row_violations(settings: AnyRun) -> list[str]:
    """What a run would say of the rows that it begins with, which are all read; `settings` passed `preflight`.

    What is no error is logged as the run logs it. Data sets of the hub are left out (`hub_data_sets`).
    """
    tokenizer = Tokenizer(next(iter(roles(settings).values())).folder)
    found: list[str] = []
    unread = hub_data_sets(settings)
    for setting, path in data_sets(settings).items():
        if not path or setting in unread:
            continue
        try:
            tell_repeats(setting, settings, len(_read(setting, settings, tokenizer)))
        except MegarlhfError as problem:
            found += str(problem).splitlines()
    return found


def hub_data_sets(settings: AnyRun) -> dict[str, str]:
    """By their settings, the names of data sets that the run downloads, so that nobody has read them before."""
    return {setting: path for setting, path in data_sets(settings).items() if path.startswith(HUB)}


def tell_repeats(setting: str, settings: AnyRun, num_rows: int) -> None:
    """Warns where a batch is larger than the data set of one of `data_sets`, which has `num_rows` rows."""
    if isinstance(settings, PPORun) and setting == "pretraining.path":
        name, size = "pretraining.batch_size", settings.pretraining.batch_size
    elif isinstance(settings, OnlineRun):
        name, size = "rollout.batch_size", settings.rollout.batch_size
    elif setting == "data.path":
        name, size = "data.batch_size", settings.data.batch_size
    else:
        return  # what is only scored is not cut into batches
    if size > num_rows:
        _log.warning(
            "%s: %d is more than the %d rows of %s, so that every batch holds rows several times; choose %d or less, "
            "or give more rows",
            *(name, size, num_rows, setting, num_rows),
        )


def _read(setting: str, settings: AnyRun, tokenizer: Tokenizer) -> Sequence[Example | Prompt]:
    """The rows of one of `data_sets`. Raises what is wrong with them."""
    if isinstance(settings, PPORun) and setting == "pretraining.path":
        # It has every field of a Corpus that reading demonstrations asks for.
        return read_demonstrations(settings.pretraining, tokenizer, "pretraining")  # type: ignore[arg-type]
    if isinstance(settings, OnlineRun):
        return read_prompts(settings.data.prompts, tokenizer, settings.data)
    if isinstance(settings, RewardModelRun) and setting == "statistics.path":
        return read_measured(settings, tokenizer)
    return reading(settings).read(settings.data, tokenizer, "data")
