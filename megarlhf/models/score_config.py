"""What config.json says about a reward model's scores, beyond their number: how they are read, and how they spread.

megarlhf_pooling     "last_token": the score of a sequence is the one at its last token, by length. transformers pools
                     at the last token that is not pad_token_id, which is the same while that id is no part of a text.
megarlhf_score_mean  one number per label: mean of the scores over the answers that they were measured on ...
megarlhf_score_std   ... and their (unbiased) standard deviation. Both are exact: JSON writes a float so that it comes
                     back bit for bit. OpenRLHF's mean and std are read where its normalize_reward is true.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarlhf.errors import CheckpointError
from megarlhf.models.architecture import Architecture, label_names, read_config
from megarlhf.models.head_styles import POOLING_KEY

MEAN_KEY, STD_KEY = "megarlhf_score_mean", "megarlhf_score_std"
_OPENRLHF_KEYS = ("normalize_reward", "mean", "std", "value_head_prefix")


@dataclass(frozen=True)
class ScoreStatistics:
    """Mean and standard deviation of a reward model's scores, by label."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def entries(self) -> dict[str, Any]:
        """As config.json holds them."""
        return {MEAN_KEY: list(self.mean), STD_KEY: list(self.std)}


@dataclass(frozen=True)
class ScoreRule:
    """How the scores of a reward model's K labels become the one score of a sequence."""

    weights: tuple[float, ...] = (1.0,)
    """[K]."""
    statistics: ScoreStatistics | None = None
    """What the scores are normalised by, each label by itself, before they are summed; None: they are not."""

    def combined(self, raw: Tensor) -> Tensor:
        """[B] float32: sum over labels of weight * (score - mean) / std, from raw scores [B, K]; in float64."""
        scores = raw.double()
        if self.statistics is not None:
            mean, std = (torch.tensor(one, dtype=torch.float64) for one in (self.statistics.mean, self.statistics.std))
            scores = (scores - mean) / std
        return (scores @ torch.tensor(self.weights, dtype=torch.float64)).float()


def score_rule(folder: str | Path, weights: Sequence[float], *, normalise: bool) -> ScoreRule:
    """The rule for the reward model in `folder`. `weights` are those of its labels, none for a model with one.

    With `normalise` the folder's statistics are applied, where it has some. Raises CheckpointError.
    """
    where, num_labels = str(Path(folder) / "config.json"), max(1, Architecture.from_folder(folder).num_labels)
    statistics = score_statistics(read_config(folder), num_labels, where) if normalise else None
    return ScoreRule(tuple(weights) or (1.0,), statistics)


def weight_violations(architecture: Architecture, weights: Sequence[float], setting: str, folder: str) -> list[str]:
    """Why `weights`, given as `setting`, do not combine the labels of the reward model in `folder`; one at most."""
    names = label_names(architecture)
    if len(names) == 1 and weights:
        return [f"{setting}: {list(weights)}, but {folder} has one label; leave {setting} out"]
    if len(names) > 1 and len(weights) != len(names):
        return [
            f"{setting}: {len(weights)} weights, but {folder} has {len(names)} labels ({', '.join(names)}), whose "
            f"weighted sum is the score; give {len(names)} weights in this order"
        ]
    if not all(map(math.isfinite, weights)):
        return [f"{setting}: {list(weights)} are not finite numbers; correct them"]
    return []


def score_statistics(config: Mapping[str, Any], num_labels: int, where: str) -> ScoreStatistics | None:
    """The statistics in a config.json, or None. Raises CheckpointError for ones that cannot be applied."""
    keys = (MEAN_KEY, STD_KEY)
    if not any(key in config for key in keys):
        if not config.get("normalize_reward"):
            return None
        keys = ("mean", "std")
    mean, std = (_numbers(config.get(key)) for key in keys)
    if len(mean) != num_labels or len(std) != num_labels or not all(value > 0 for value in std):
        raise CheckpointError(
            f"{where}: {keys[0]} {config.get(keys[0])} and {keys[1]} {config.get(keys[1])} are not {num_labels} finite "
            "numbers each, the deviations above 0; correct them, or remove both"
        )
    return ScoreStatistics(mean, std)


def without_score_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without what it said about scores, in any library's words."""
    gone = {POOLING_KEY, MEAN_KEY, STD_KEY}
    if "normalize_reward" in config or "value_head_prefix" in config:
        gone |= set(_OPENRLHF_KEYS)
    return {key: value for key, value in config.items() if key not in gone}


def _numbers(value: object) -> tuple[float, ...]:
    values = value if isinstance(value, list) else [value]
    is_number = [type(one) in (int, float) and math.isfinite(one) for one in values]
    return tuple(float(one) for one in values) if all(is_number) else ()
