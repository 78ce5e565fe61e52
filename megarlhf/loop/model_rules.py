"""Rules of models and settings that need config.json only: no tokenizer, no torch. Preflight and planner ask."""

from collections.abc import Mapping

from megarlhf.config.runs import AnyRun, OfflineRun, OnlineRun
from megarlhf.loop.roles import Role, roles
from megarlhf.models.architecture import Architecture, label_names, layout_violations


def model_violations(settings: AnyRun, models: Mapping[str, Architecture]) -> list[str]:
    """What is wrong with the models of a run, by role: layouts, heads, lengths."""
    cast = roles(settings)
    found = [
        line for name, one in models.items() for line in layout_violations(one, cast[name].layout, cast[name].setting)
    ]
    found += [line for name, one in models.items() for line in head_violations(cast[name], one)]
    if isinstance(settings, OnlineRun):
        return found + online_length_violations(settings, models)
    return found + offline_length_violations(settings, models)


def head_violations(role: Role, architecture: Architecture) -> list[str]:
    """A language model where one has to generate; a score head that a role can go on with where one has to judge."""
    if role.head == "vocabulary" and architecture.num_labels:
        return [f"actor.model: {role.folder} has a score head, it cannot generate; give a causal language model"]
    if role.head == "vocabulary" or role.has_new_head(architecture):
        return []
    if not architecture.num_labels:
        remedy = "give a SequenceClassification model"
        remedy += f", or set {role.name}.new_head to if_missing" if role.is_trained else ""
        return [f"{role.name}.model: {role.folder} is a language model without a score head; {remedy}"]
    return _label_violations(role, architecture) if role.is_trained else []


def _label_violations(role: Role, architecture: Architecture) -> list[str]:
    """A head that is trained further keeps its labels."""
    names, wanted = label_names(architecture), role.labels
    if len(names) == max(1, len(wanted)) and (not wanted or not architecture.labels or names == wanted):
        return []
    asked = f"algorithm.attributes {', '.join(wanted)}" if wanted else "one score"
    return [
        f"{role.name}.model: the score head of {role.folder} has the labels {', '.join(names)}, not {asked}; set "
        f"{role.name}.new_head to always to start from its body with a new head, or give another model"
    ]


def online_length_violations(settings: OnlineRun, models: Mapping[str, Architecture]) -> list[str]:
    """Prompt and response together fit the positions of every model that reads them."""
    longest = settings.data.max_prompt_tokens + settings.rollout.max_new_tokens
    return [
        f"{name}.model: sequences of up to {longest} tokens (data.max_prompt_tokens {settings.data.max_prompt_tokens} "
        f"+ rollout.max_new_tokens {settings.rollout.max_new_tokens}) exceed its {model.max_positions} positions; "
        "lower one"
        for name, model in models.items()
        if name != "generator" and longest > model.max_positions
    ]


def offline_length_violations(settings: OfflineRun, models: Mapping[str, Architecture]) -> list[str]:
    """The longest sequence of the data set fits the model's positions."""
    return [
        f"data.max_tokens: {settings.data.max_tokens} exceeds the {model.max_positions} positions of {name}.model; "
        f"choose {model.max_positions} or less"
        for name, model in models.items()
        if settings.data.max_tokens > model.max_positions
    ]
