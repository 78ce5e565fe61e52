"""What a config.json says about rotary embeddings, bases, scaling and in which layers; or why it cannot be done here.

Files of transformers 4 say it in `rope_theta` and `rope_scaling` (and `rope_local_base_freq`), files of transformers 5
in `rope_parameters`, which holds one object a kind of layer where layers differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN = ("factor", "original_max_position_embeddings")
_NEEDED = {"default": (), "linear": ("factor",), "llama3": _LLAMA3, "yarn": _YARN}
_YARN_OPTIONS = ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate")
_LAYER_KINDS = ("full_attention", "sliding_attention")
_GROWS = "the angles of all positions change as a text grows, so that cached keys would be wrong"
_REASONS = {"dynamic": _GROWS, "longrope": _GROWS, "su": _GROWS}


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base `theta`, the kind of scaling, and the scaling's own numbers, by name."""

    theta: float = 10000.0
    kind: str = "default"
    parameters: tuple[tuple[str, Any], ...] = ()
    fraction: float = 1.0
    """Of a head's dimension that is rotated, the first ones; the rest is left as it is."""

    def as_dict(self) -> dict[str, Any]:
        """The `rope_parameters` object of transformers 5."""
        partial = {} if self.fraction == 1.0 else {"partial_rotary_factor": self.fraction}
        return {"rope_type": self.kind, "rope_theta": self.theta, **dict(self.parameters), **partial}


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Rope of the model, or of the layers that see all tokens. Raises nothing once `rope_problems` found none."""
    source = _source(config)
    theta, kind = source.get("rope_theta") or config.get("rope_theta") or 10000.0, _kind(source)
    parameters = tuple((name, _detail(config, source, name)) for name in _NEEDED[kind])
    if kind == "yarn":
        parameters += tuple((name, source[name]) for name in _YARN_OPTIONS if source.get(name) is not None)
    return Rope(float(theta), kind, parameters, _fraction(config, source))


def read_window_rope(config: Mapping[str, Any]) -> Rope | None:
    """Rope of the layers with a window, in the model types where it is another one: never scaled."""
    if "rope_local_base_freq" not in config:
        return None
    nested = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    return Rope(float(nested.get("rope_theta") or config["rope_local_base_freq"]))


def rope_problems(config: Mapping[str, Any], is_partial_allowed: bool) -> list[str]:
    """Every reason why the rope of a config (with its defaults) cannot be built, naming the field."""
    parameters = config.get("rope_parameters") or {}
    nested = {name: parameters[name] for name in _LAYER_KINDS if parameters.get(name) is not None}
    wrong = [f"rope_parameters {name} is {found!r}; expected an object" for name, found in nested.items()
             if not isinstance(found, Mapping)]  # fmt: skip
    if wrong:
        return wrong
    source = _source(config)
    kind, fraction = _kind(source), _fraction(config, source)
    if kind not in _NEEDED:
        reason = f": {_REASONS[kind]}" if kind in _REASONS else ""
        return [f"rope_type {kind!r} is not supported{reason}; supported: {', '.join(_NEEDED)}"]
    problems = [f"rope_type {kind!r} needs {name}" for name in _NEEDED[kind] if _detail(config, source, name) is None]
    numbers = [name for name in (*_NEEDED[kind], *_YARN_OPTIONS) if source.get(name) is not None and name != "truncate"]
    problems += [
        f"{name} of rope_type {kind!r} is {source[name]!r}; expected a number"
        for name in numbers
        if type(source[name]) not in (int, float)
    ]
    if fraction != 1.0 and (kind != "default" or not is_partial_allowed):
        supported = "1.0" if kind == "default" else "1.0 with a scaled rope"
        problems.append(f"partial_rotary_factor {fraction} is not supported; supported: {supported}")
    local = _kind(nested.get("sliding_attention", {}))
    if local != "default":
        problems.append(f"rope_type {local!r} of sliding_attention is not supported; supported: default")
    if nested and "rope_local_base_freq" not in config:
        problems.append("rope_parameters: one object a kind of layer is not supported for this model_type")
    return problems


def _source(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object that holds the scaling: of `rope_parameters` (transformers 5) or `rope_scaling` (4), or nothing."""
    parameters = config.get("rope_parameters") or {}
    if any(name in parameters for name in _LAYER_KINDS):
        parameters = parameters.get("full_attention") or {}
    return parameters or config.get("rope_scaling") or {}


def _kind(source: Mapping[str, Any]) -> str:
    return source.get("rope_type") or source.get("type") or "default"


def _detail(config: Mapping[str, Any], source: Mapping[str, Any], name: str) -> Any:
    """A number of the scaling. Yarn stretches from the model's own length where it names no other."""
    if name == "original_max_position_embeddings" and _kind(source) == "yarn":
        return source.get(name) or config.get("max_position_embeddings")
    return source.get(name)


def _fraction(config: Mapping[str, Any], source: Mapping[str, Any]) -> float:
    given = source.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    return 1.0 if given is None else float(given)
