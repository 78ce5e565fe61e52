"""What can be wrong, or unwise, in the `algorithm` section of any command: ranges, and options that contradict."""

from collections.abc import Callable, Iterator
from typing import Any

from megarlhf.config.algorithms import (
    DPO,
    GRPO,
    KTO,
    PPO,
    RLOO,
    SFT,
    PolicyGradient,
    ReinforcePlusPlus,
    RewardModelling,
)

_LARGEST_KL_ERROR = 0.2
"""The relative error to which the adaptive controller clips (algorithms/kl_control.py)."""

AlgorithmSettings = PolicyGradient | DPO | KTO | SFT | RewardModelling

_Range = tuple[Callable[[Any], bool], str]
_POSITIVE: _Range = (lambda value: value > 0, "more than 0")
_NOT_NEGATIVE: _Range = (lambda value: value >= 0, "0 or more")
_AT_LEAST_ONE: _Range = (lambda value: value >= 1, "1 or more")
_FRACTION: _Range = (lambda value: 0 <= value <= 1, "between 0 and 1")
_PROBABILITY: _Range = (lambda value: 0 < value <= 1, "more than 0 and at most 1")
_RANGES: dict[str, _Range] = {
    "gamma": _FRACTION,
    "lambda_": _FRACTION,
    "kl_coef": _NOT_NEGATIVE,
    "kl_target": _POSITIVE,
    "kl_horizon": _AT_LEAST_ONE,
    "clip_low": _PROBABILITY,
    "clip_high": _POSITIVE,
    "dual_clip": (lambda value: value == 0 or value > 1, "more than 1, or 0 for none"),
    "loss_length": _NOT_NEGATIVE,
    "entropy_coef": _NOT_NEGATIVE,
    "importance_cap": (lambda value: value is None or value >= 0, "0 or more"),
    "value_clip": _NOT_NEGATIVE,
    "critic_warmup_steps": _NOT_NEGATIVE,
    "reward_clip": _NOT_NEGATIVE,
    "missing_eos_penalty": _NOT_NEGATIVE,
    "overlong_length": _NOT_NEGATIVE,
    "overlong_buffer": _NOT_NEGATIVE,
    "overlong_penalty": _NOT_NEGATIVE,
    "penalty_coef": _POSITIVE,
    "penalty_target": _POSITIVE,
    "num_epochs": _AT_LEAST_ONE,
    "num_minibatches": _AT_LEAST_ONE,
    "target_kl": _NOT_NEGATIVE,
    "beta": _POSITIVE,
    "label_smoothing": (lambda value: 0 <= value < 0.5, "at least 0 and below 0.5"),
    "sft_coef": _NOT_NEGATIVE,
    "desirable_weight": _NOT_NEGATIVE,
    "undesirable_weight": _NOT_NEGATIVE,
    "centring_coef": _NOT_NEGATIVE,
}


def algorithm_violations(settings: AlgorithmSettings, samples_per_prompt: int = 0) -> list[str]:
    """Everything wrong with an algorithm's settings, a sentence each that opens with the setting.

    `samples_per_prompt` is the rollout's, 0 for a command that does not sample.
    """
    found = list(_out_of_range(settings))
    if isinstance(settings, PolicyGradient):
        found += [*_policy(settings), *_groups(settings, samples_per_prompt)]
    if isinstance(settings, PPO):
        found += _penalty(settings)
    if isinstance(settings, DPO) and settings.loss == "ipo" and settings.label_smoothing > 0:
        found.append(
            f"algorithm.label_smoothing: {settings.label_smoothing} is for loss sigmoid; IPO has no log-sigmoid to "
            "smooth; set it to 0"
        )
    return [*found, *_attributes(settings), *_unread(settings)] if isinstance(settings, RewardModelling) else found


def horizon_violations(settings: PolicyGradient, episodes: int) -> Iterator[str]:
    """A step of `episodes` sequences multiplies the adaptive coefficient by 1 - 0.2 * episodes / kl_horizon at least,
    which must stay above 0."""
    if settings.kl_controller == "adaptive" and settings.kl_horizon <= _LARGEST_KL_ERROR * episodes:
        least = int(_LARGEST_KL_ERROR * episodes) + 1
        yield (
            f"algorithm.kl_horizon: {settings.kl_horizon} episodes are too few for steps of {episodes}: one step could "
            f"take the adaptive coefficient below 0; choose {least} or more, {episodes} or more to move it gently"
        )


def algorithm_warnings(settings: AlgorithmSettings) -> list[str]:
    """What is allowed and will hardly do what was meant, a sentence each."""
    if not isinstance(settings, PolicyGradient) or settings.kl_coef <= 0:
        return []
    if settings.kl_in == "loss" and settings.kl_estimator == "k1":
        return [
            "algorithm.kl_estimator: k1 as a loss has gradient 1 in every log-prob, wherever the reference is, so the "
            "penalty does not pull towards it; use k2 or k3, or kl_in reward"
        ]
    return []


def _out_of_range(settings: AlgorithmSettings) -> Iterator[str]:
    for name, value in vars(settings).items():
        if name in _RANGES and not _RANGES[name][0](value):
            typed, words = name.removesuffix("_"), _RANGES[name][1]
            yield f"algorithm.{typed}: {value} is out of range; choose a value that is {words}"


def _policy(settings: PolicyGradient) -> Iterator[str]:
    if settings.loss_mean == "fixed_length" and settings.loss_length == 0:
        yield (
            "algorithm.loss_length: 0 with loss_mean fixed_length; give the number of tokens that every sequence "
            "counts for, such as rollout.max_new_tokens"
        )
    if 0 < settings.overlong_length < settings.overlong_buffer:
        yield (
            f"algorithm.overlong_buffer: {settings.overlong_buffer} tokens do not fit below overlong_length "
            f"{settings.overlong_length}; choose {settings.overlong_length} or less"
        )
    if settings.kl_controller == "adaptive" and settings.kl_coef == 0:
        yield "algorithm.kl_coef: 0 cannot be adapted, it is only ever multiplied; choose a number above 0"


def _groups(settings: PolicyGradient, samples_per_prompt: int) -> Iterator[str]:
    compares = isinstance(settings, GRPO | RLOO) or (isinstance(settings, ReinforcePlusPlus) and settings.baseline)
    if compares and samples_per_prompt == 1:
        yield (
            "rollout.samples_per_prompt: 1 response has no siblings to be compared with, so every advantage would be "
            "0; choose 2 or more"
        )


def _attributes(settings: RewardModelling) -> Iterator[str]:
    names = settings.attributes
    if names and settings.loss != "regression":
        yield (
            f"algorithm.attributes: {', '.join(names)} with loss {settings.loss}: which answer is better says nothing "
            "of single attributes; set loss to regression, or leave attributes out"
        )
    if len(set(names)) < len(names) or not all(names):
        yield f"algorithm.attributes: {list(names)} are not different names; give each attribute its own"


def _unread(settings: RewardModelling) -> Iterator[str]:
    """What only compared answers have."""
    for name in ("label_smoothing", "margins", "centring_coef"):
        value = vars(settings)[name]
        if value and settings.loss == "regression":
            off = str(type(value)(0)).lower()
            yield f"algorithm.{name}: {value} is about compared answers, and loss is regression; set it to {off}"


def _penalty(settings: PPO) -> Iterator[str]:
    if settings.policy_loss != "penalty":
        return
    if settings.dual_clip:
        yield (
            f"algorithm.dual_clip: {settings.dual_clip} bounds a loss that is clipped, and policy_loss penalty clips "
            "nothing; set it to 0, or policy_loss to clip"
        )
    if settings.num_epochs * settings.num_minibatches == 1:
        yield (
            "algorithm.policy_loss: penalty acts between the updates of a step, and num_epochs 1 * num_minibatches 1 "
            "is a single one, at which KL(old, new) is 0; choose more updates or policy_loss clip"
        )
