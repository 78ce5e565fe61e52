"""Layers of Transformer Engine: which fields of megatron-core's config make them, and the copies that they keep.

A linear keeps its quantised weight from the first pass to the next time it is told that weights changed; until then it
computes with the old one. Weights themselves stay in the model's precision (`fp8_param` is off): eight-bit parameters
could be neither moved between layouts nor sent to the host.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.transformer import TransformerConfig

from megarlhf.models.precision.linears import Linears


def config_fields(linears: Linears) -> dict[str, Any]:
    """Fields of TransformerConfig for layers of Transformer Engine in FP8; none for all others."""
    fp8 = linears.fp8
    if not linears.is_te_fp8:
        return {}
    return {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        "fp8_param": False,
        "first_last_layers_bf16": fp8.num_layers_at_start_in_bf16 + fp8.num_layers_at_end_in_bf16 > 0,
        "num_layers_at_start_in_bf16": fp8.num_layers_at_start_in_bf16,
        "num_layers_at_end_in_bf16": fp8.num_layers_at_end_in_bf16,
        "fp8_amax_history_len": fp8.amax_history,
        "fp8_amax_compute_algo": "max",
        "disable_parameter_transpose_cache": linears.is_frozen,
    }


def layer_precision(config: TransformerConfig, layer_number: int) -> AbstractContextManager[None]:
    """What the layer with this number (from 1) computes in, as megatron-core's block enters it: for passes without
    gradient that walk the layers themselves."""
    return get_fp8_context(config, layer_number - 1)


def forget_weights(chunks: Iterable[torch.nn.Module]) -> None:
    """Drops the quantised copies that linears keep of their weights, and their memory."""
    for chunk in chunks:
        for part in chunk.modules():
            vars(part).get("_fp8_workspaces", {}).clear()
        chunk.set_is_first_microbatch()


def named_scales(layer: torch.nn.Module) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Delayed scaling's memory in a layer: by linear and direction its scales [K] and largest magnitudes [steps, K].

    Forward K is 3 (input, weight, output), backward 2. Nothing before the first pass, and nothing for other recipes.
    """
    for name, part in layer.named_modules():
        for direction in ("scaling_fwd", "scaling_bwd"):
            state = vars(part).get("fp8_meta", {}).get(direction)
            if state is not None and "amax_history" in vars(state):
                yield f"{name}.{direction}", [state.scale, state.amax_history]


@torch.no_grad()
def make_scales(layer: torch.nn.Module, config: TransformerConfig) -> None:
    """Makes what `named_scales` names before there was a pass, so that it can be filled."""
    with layer_precision(config, layer.layer_number):
        for part in layer.modules():
            if "fp8_meta" in vars(part):
                part.init_fp8_metadata(num_gemms=1)
