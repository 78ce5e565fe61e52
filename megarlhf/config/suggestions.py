"""What somebody most likely meant who typed a setting that does not exist."""

import difflib
from collections.abc import Collection, Iterable

from megarlhf.config.fields import dotted_names, settings_of

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "lr": ("learning_rate",),
    "max_grad_norm": ("clip_grad",),
    "gradient_checkpointing": ("recompute",),
    "n": ("samples_per_prompt",),
    "num_generations": ("samples_per_prompt",),
    "n_samples_per_prompt": ("samples_per_prompt",),
    "beta": ("kl_coef",),
    "init_kl_coef": ("kl_coef",),
    "eps_clip": ("clip_low",),
    "cliprange": ("clip_low",),
    "max_completion_length": ("max_new_tokens",),
    "generate_max_len": ("max_new_tokens",),
    "max_prompt_length": ("max_prompt_tokens",),
    "max_length": ("max_tokens", "max_new_tokens"),
    "train_batch_size": ("batch_size",),
    "per_device_train_batch_size": ("batch_size",),
    "num_train_epochs": ("epochs",),
    "max_steps": ("steps",),
    "save_steps": ("checkpoint_every",),
    "output_dir": ("dir",),
    "model_name_or_path": ("model",),
    "pretrain": ("model",),
    "gpus": ("ranks",),
    "nproc": ("ranks",),
    "nproc_per_node": ("ranks",),
}
"""What other trainers call settings and flags, and what they are called here; of several, the first that there is."""


def suggestion(key: str, prefix: str, root: type, own_flags: Collection[str] = ()) -> str:
    """The setting of `root` most likely meant by `prefix` + `key` (`actor.` and `modle`).

    A flag of the command (`own_flags`: `--ranks`) or a sibling of a like name, else any like it, else the same name, or
    another word for it, elsewhere.
    """
    names = list(dotted_names(root))
    if prefix + key in names:
        return f"it is a section; accepted in it: {', '.join(_children(names, f'{prefix}{key}.'))}"
    flags = [flag.lstrip("-") for flag in own_flags] if not prefix else []
    flag = _closest(key, flags)
    if flag:
        return f"did you mean --{flag}?"
    siblings = _children(names, prefix)
    sibling = _closest(key, siblings)
    if sibling:
        return f"did you mean {prefix}{sibling}?"
    elsewhere = [name for name in names if name not in _paths(prefix) and name.rpartition(".")[0] != prefix[:-1]]
    alike = [name for name in elsewhere if difflib.SequenceMatcher(None, key, _leaf(name)).ratio() >= 0.7]
    likely = difflib.get_close_matches(prefix + key, alike, n=1, cutoff=0.8) or _named(key, elsewhere, prefix)
    if likely:
        return f"did you mean {' or '.join(likely)}?"
    if siblings:
        return f"accepted here: {', '.join(siblings)}"
    return f"sections: {', '.join(setting.name for setting in settings_of(root))}"


def _closest(key: str, names: Collection[str]) -> str | None:
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.7)
    return next(iter([*close, *(name for name in OTHER_NAMES.get(key, ()) if name in names)]), None)


def _named(key: str, names: Iterable[str], prefix: str) -> list[str]:
    """Up to three of `names` that end in `key`, or in what that is called here; those of the same section if any."""
    found: list[str] = []
    for word in (key, *OTHER_NAMES.get(key, ())):
        found = found or [name for name in names if _leaf(name) == word]
    section = prefix.partition(".")[0]
    near = [name for name in found if section and name.startswith(section + ".")]
    return (near or found)[:3]


def _children(names: Iterable[str], prefix: str) -> list[str]:
    return [name[len(prefix) :] for name in names if name.startswith(prefix) and "." not in name[len(prefix) :]]


def _paths(prefix: str) -> set[str]:
    """The sections that a name lies in: `actor` and `actor.train` for `actor.train.`."""
    parts = prefix.split(".")[:-1]
    return {".".join(parts[: depth + 1]) for depth in range(len(parts))}


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
