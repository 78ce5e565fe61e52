"""Settings of a data set that is learnt from as it is written: demonstrations, preferences, scored answers."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Corpus:
    """Where examples come from, and how they are cut into batches."""

    path: str = ""
    """JSONL or Parquet file, folder of a data set saved by the `datasets` package, or hub:OWNER/NAME."""
    split: str = "train"
    """Split that is read where a data set folder or hub data set has several."""
    batch_size: int = 32
    """Examples (conversations, texts, comparisons, answers) of one step."""
    epochs: int = 1
    """Times the data set is gone through."""
    max_tokens: int = 1024
    """Longest sequence: prompt and answer together."""
    too_long: Literal["error", "drop", "truncate_left", "truncate_right", "split"] = "error"
    """What to do with a longer one; truncate_left cuts prompts, truncate_right answers, split is for plain texts."""
    append_eos: bool = True
    """End answers and texts with the end token where they do not end with a stop token already."""
    shuffle: bool = True
    """Shuffle the examples anew in every epoch."""


@dataclass(frozen=True)
class Negatives:
    """Comparisons of a good answer with a spoilt one, which keep a reward model from being fooled."""

    share: float = 0.0
    """Share of the comparisons whose best answer meets a spoilt answer in place of the others, drawn every epoch."""
    kinds: tuple[str, ...] = ("shuffled", "truncated", "repeated")
    """How answers are spoilt: another prompt's best answer, cut short, or padded with repetition."""
