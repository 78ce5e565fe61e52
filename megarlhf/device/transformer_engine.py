"""What Transformer Engine's layers need of a machine, asked before anything is built, without importing it."""

from dataclasses import dataclass
from typing import Self

import torch

from megarlhf.config.precision import FP8, LEAST_CAPABILITY, dotted, lacking_gpu
from megarlhf.device.packages import can_import, installed


@dataclass(frozen=True)
class Machine:
    """What matters of this process's machine."""

    transformer_engine: str | None
    """Version; None where it is not installed."""
    capability: tuple[int, int] | None
    """Compute capability of the GPU, such as (9, 0) on Hopper; None without one."""
    cuda: tuple[int, ...] = ()
    """CUDA version that torch was built for."""

    @classmethod
    def here(cls) -> Self:
        """As it is."""
        found = (installed("transformer-engine") or "unknown") if can_import("transformer_engine") else None
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        return cls(found, capability, tuple(int(part) for part in (torch.version.cuda or "").split(".") if part))


_BLOCKWISE_CUDA = (12, 9)


def in_words(machine: Machine) -> str:
    """What layers te can do on `machine`."""
    if machine.transformer_engine is None or machine.capability is None:
        return "no layers te: " + ("not installed" if machine.transformer_engine is None else "no GPU")
    fits = [recipe for recipe in LEAST_CAPABILITY if not _lacks(machine, machine.capability, recipe)]
    return f"layers te; FP8 recipes: {', '.join(fits) or 'none'}"


def missing_for_te(machine: Machine, name: str, recipes: dict[str, FP8]) -> list[str]:
    """Why the model in section `name` cannot have layers te on `machine`, a sentence each.

    `recipes` by their setting's name (actor.fp8, actor.generate_fp8). FP8 is never replaced by another precision.
    """
    if machine.transformer_engine is None:
        return [
            f"{name}.layers: te needs Transformer Engine, which is not installed; install it "
            f"(pip install --no-build-isolation 'megarlhf[te]'), or set {name}.layers to local"
        ]
    if machine.capability is None:
        return [f"{name}.layers: te needs a GPU, and there is none here; set {name}.layers to local or emulated_fp8"]
    found = []
    for setting, fp8 in recipes.items():
        if fp8.is_on:
            found += _recipe_violations(machine, machine.capability, setting, fp8.recipe)
    return found


def _recipe_violations(machine: Machine, capability: tuple[int, int], setting: str, recipe: str) -> list[str]:
    fits = [name for name in LEAST_CAPABILITY if not _lacks(machine, capability, name)]
    lacks = _lacks(machine, capability, recipe)
    return [f"{setting}.recipe: {recipe} needs {lacks}; choose {' or '.join([*fits, 'off'])}"] if lacks else []


def _lacks(machine: Machine, capability: tuple[int, int], recipe: str) -> str:
    """What a recipe needs that is not there, and what is; empty when it can run."""
    if lacking := lacking_gpu(recipe, capability):
        return lacking
    if recipe == "blockwise" and machine.cuda < _BLOCKWISE_CUDA:
        return f"CUDA {dotted(_BLOCKWISE_CUDA)} or newer, and torch was built for {dotted(machine.cuda) or 'none'}"
    return ""
