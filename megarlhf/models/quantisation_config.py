"""Which quantised weights a config.json may announce: FP8 with a scale a block, which loading multiplies in."""

from collections.abc import Mapping
from typing import Any

BLOCK = 128
"""Rows and columns that share a scale."""


def quantisation_problems(config: Mapping[str, Any]) -> list[str]:
    """Why the quantised weights of a config.json cannot be read; nothing when they can, or there are none."""
    quantised = config.get("quantization_config")
    if not quantised:
        return []
    method, form, blocks = (quantised.get(name) for name in ("quant_method", "fmt", "weight_block_size"))
    move = "save the model in bfloat16 first"
    if method != "fp8":
        return [f"quantization_config: quant_method {method!r} is not supported; supported: 'fp8'; {move}"]
    if form not in (None, "e4m3") or blocks != [BLOCK, BLOCK]:
        return [
            f"quantization_config: fmt {form!r}, weight_block_size {blocks} is not supported; supported: 'e4m3' "
            f"and [{BLOCK}, {BLOCK}]; {move}"
        ]
    return []
