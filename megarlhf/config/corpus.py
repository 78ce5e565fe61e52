"""Settings of a data set that is learnt from as it is written: demonstrations, preferences, scored answers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

BadRow = Literal["error", "skip"]
NEGATIVE_KINDS = ("shuffled", "truncated", "repeated")


@dataclass(frozen=True)
class Texts:
    """Where examples come from, and how they are cut into batches."""

    path: str = ""
    """JSONL or Parquet file, folder of a data set saved by the `datasets` package, or hub:OWNER/NAME."""
    split: str = "train"
    """Split that is read where a data set folder or hub data set has several."""
    batch_size: int = 32
    """Examples (conversations, texts, comparisons, answers) of one step."""
    max_tokens: int = 1024
    """Longest sequence: prompt and answer together."""
    too_long: Literal["error", "drop", "truncate_left", "truncate_right", "split"] = "error"
    """What to do with a longer one; truncate_left cuts prompts, truncate_right answers, split is for plain texts."""
    append_eos: bool = True
    """End answers and texts with the end token where they do not end with a stop token already."""
    shuffle: bool = True
    """Shuffle the examples anew in every epoch."""
    on_bad_row: BadRow = "error"
    """What becomes of rows that cannot be used (not JSON, without a key, of a wrong type, too long). error: every one
    is reported and nothing starts. skip: they are left out, and their number and the first places are told."""
    max_bad_share: float = 0.01
    """With on_bad_row skip: the largest share of bad rows (one may always be) with which a run starts all the same."""


@dataclass(frozen=True)
class Corpus(Texts):
    """A data set that a run goes through."""

    epochs: int = 1
    """Times the data set is gone through."""


@dataclass(frozen=True)
class Negatives:
    """Comparisons of a good answer with a spoilt one, which keep a reward model from being fooled."""

    share: float = 0.0
    """Share of the comparisons whose best answer meets a spoilt answer in place of the others, drawn every epoch."""
    kinds: tuple[str, ...] = NEGATIVE_KINDS
    """How answers are spoilt: another prompt's best answer, cut short, or padded with repetition."""


@dataclass(frozen=True)
class Statistics:
    """Mean and deviation of the trained model's scores, which are kept with it (config.json) to normalise them by."""

    path: str = ""
    """Data set whose answers are scored, with rows like those of `data`; empty: the data set that was trained on."""
    max_examples: int = 1024
    """The first so many examples, in the data set's order, are scored; 0: the model is exported without statistics."""


def corpus_violations(settings: Texts, section: str) -> Iterator[str]:
    """What is wrong with a corpus whose settings are under the name `section`, without a look at the file."""
    if not settings.path:
        yield f"{section}.path: is not set; give a path"
    if not 0 <= settings.max_bad_share <= 1:
        yield f"{section}.max_bad_share: {settings.max_bad_share} is out of range; choose a value between 0 and 1"
    for name, least in (("batch_size", 1), ("epochs", 1), ("max_tokens", 2)):
        if name in vars(settings) and vars(settings)[name] < least:
            yield f"{section}.{name}: {vars(settings)[name]} is out of range; choose {least} or more"


def negatives_violations(settings: Negatives, section: str) -> Iterator[str]:
    """What is wrong with the settings of spoilt answers, which are under the name `section`."""
    if not 0 <= settings.share <= 1:
        yield f"{section}.share: {settings.share} is out of range; choose a value that is between 0 and 1"
    if settings.share and not settings.kinds:
        yield f"{section}.kinds: is empty; give at least one of {', '.join(NEGATIVE_KINDS)}, or set share to 0"
    for kind in settings.kinds:
        if kind not in NEGATIVE_KINDS:
            yield f"{section}.kinds: {kind!r} is unknown; accepted: {', '.join(NEGATIVE_KINDS)}"
