"""Eight-bit linears of a model: which recipe, and which layers keep the model's own precision. No torch here."""

from dataclasses import dataclass
from typing import Literal

Layers = Literal["local", "te", "emulated_fp8"]
Recipe = Literal["off", "blockwise", "tensorwise", "mxfp8", "delayed"]


@dataclass(frozen=True)
class FP8:
    """Eight-bit floating point in the linears of a model's layers; embedding, heads and norms never use it."""

    recipe: Recipe = "off"
    """Which numbers share a scale: a 1x128 or 128x128 block, a tensor, 32 in a row (mxfp8), or a tensor with the scale
    of earlier steps (delayed); off: no eight-bit numbers."""
    format: Literal["e4m3", "hybrid"] = "e4m3"
    """Gradients in E4M3 like everything else, or (hybrid) in E5M2."""
    num_layers_at_start_in_bf16: int = 0
    """First layers that keep the model's own precision."""
    num_layers_at_end_in_bf16: int = 0
    """Last layers that keep the model's own precision."""
    amax_history: int = 16
    """Steps that delayed scaling looks back over."""
    force_delayed: bool = False
    """Allow delayed scaling while sampling and training alternate, though scoring passes then disturb its scales."""

    @property
    def is_on(self) -> bool:
        """Some linears compute in eight bits."""
        return self.recipe != "off"


NO_FP8 = FP8()


LEAST_CAPABILITY = {"tensorwise": (8, 9), "delayed": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""Compute capability that each recipe needs with layers te (transformer_engine/pytorch/quantization.py)."""
_NEWEST_MXFP8 = (12, 0)
"""From here on Transformer Engine does not support MXFP8 in all its products."""


def lacking_gpu(recipe: str, capability: tuple[int, int]) -> str:
    """The GPU that a recipe needs where one of compute capability `capability` will not do; empty where it will."""
    if capability < LEAST_CAPABILITY[recipe]:
        needed = f"{dotted(LEAST_CAPABILITY[recipe])} or more"
    elif recipe == "mxfp8" and capability >= _NEWEST_MXFP8:
        needed = "10.0 to 11.x"
    else:
        return ""
    return f"a GPU of compute capability {needed}, and this one has {dotted(capability)}"


def dotted(numbers: tuple[int, ...]) -> str:
    """A version of these numbers."""
    return ".".join(map(str, numbers))


def precision_violations(layers: Layers, recipes: dict[str, FP8], name: str) -> list[str]:
    """What is wrong with the FP8 settings of the model in section `name`, a sentence each.

    `recipes` by their setting's name (actor.fp8, actor.generate_fp8).
    """
    on = [setting for setting, fp8 in recipes.items() if fp8.is_on]
    found = [
        f"{setting}.recipe: {recipes[setting].recipe} needs FP8 linears, and {name}.layers is local; set {name}.layers "
        f"to te on a GPU, or to emulated_fp8, or {setting}.recipe to off"
        for setting in on
        if layers == "local"
    ]
    if layers == "emulated_fp8" and not on:
        found.append(f"{name}.layers: emulated_fp8 needs a recipe; set {name}.fp8.recipe, or {name}.layers to local")
    for setting in on:
        found += _recipe_violations(recipes[setting], setting)
        found += _delayed_violations(recipes[setting], setting) if layers == "te" else []
    return found


def _delayed_violations(fp8: FP8, setting: str) -> list[str]:
    """Transformer Engine ends a step of delayed scaling where its context ends: there is one for all layers."""
    kept = [name for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16") if vars(fp8)[name]]
    if fp8.recipe != "delayed" or not kept:
        return []
    return [f"{setting}.{name}: delayed scaling covers all layers of layers te; set it to 0" for name in kept]


def _recipe_violations(fp8: FP8, setting: str) -> list[str]:
    smallest = {"num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 0, "amax_history": 1}
    found = [
        f"{setting}.{name}: {vars(fp8)[name]} is out of range; choose {least} or more"
        for name, least in smallest.items()
        if vars(fp8)[name] < least
    ]
    return found
