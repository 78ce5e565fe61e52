"""What the linears of a model's layers are, and what eight-bit ones ask of a model's sizes and of a stream's length."""

from dataclasses import dataclass

from megarlhf.config.layout import Layout
from megarlhf.config.precision import FP8, NO_FP8, Layers
from megarlhf.models.architecture import Architecture
from megarlhf.models.precision import BLOCK, MX_BLOCK

_MULTIPLE = 16
"""Of every dimension of an eight-bit matrix product (cuBLAS; TE's own check is weaker: 8 rows, 16 columns)."""


@dataclass(frozen=True)
class Linears:
    """One choice for all layers of a model."""

    layers: Layers = "local"
    fp8: FP8 = NO_FP8
    is_frozen: bool = False
    """The weights are never trained: each pass quantises them again, and no copy is kept."""
    takes_adapters: bool = False
    """LoRA's adapters will stand beside them, which read what a linear reads: norms stay modules of their own."""

    @property
    def is_te_fp8(self) -> bool:
        """Transformer Engine computes in eight bits."""
        return self.layers == "te" and self.fp8.is_on

    @property
    def token_multiple(self) -> int:
        """What the tokens of a rank must be a multiple of; emulated products take any number."""
        return self.dimension_multiple if self.is_te_fp8 else 1

    @property
    def dimension_multiple(self) -> int:
        """Of a dimension, so that scales never reach across what shares a kernel's tile."""
        return {"blockwise": BLOCK, "mxfp8": MX_BLOCK}.get(self.fp8.recipe, _MULTIPLE)


LOCAL = Linears()
"""megatron-core's own linears, in the model's precision."""


def te_violations(linears: Linears, architecture: Architecture, layout: Layout, setting: str) -> list[str]:
    """Why layers of Transformer Engine cannot be of these sizes, a sentence each, opening with the layout's setting.

    Dimensions of FP8 products on a rank must be multiples of 16 (32 for mxfp8).
    """
    if linears.layers != "te":
        return []
    if architecture.mixture is not None:
        return [f"{setting}: layers te of {architecture.family} models with experts are not built; set layers to local"]
    if not linears.fp8.is_on:
        return []
    needed = MX_BLOCK if linears.fp8.recipe == "mxfp8" else _MULTIPLE
    found = [
        f"{setting}: tp {layout.tp} leaves a rank {size:g} {name}, and FP8 products ({linears.fp8.recipe}) need a "
        f"multiple of {needed}; choose another tp, or fp8.recipe off"
        for name, size in sizes(architecture, layout).items()
        if size % needed
    ]
    found += _kept_violations(linears.fp8, architecture, layout, setting)
    if linears.fp8.recipe == "delayed" and layout.pp > 1:
        found.append(
            f"{setting}: pp {layout.pp}: Transformer Engine reduces delayed scaling's magnitudes over all ranks, which "
            "stages do at different times; use pp 1, or another fp8.recipe"
        )
    return found


def _kept_violations(fp8: FP8, architecture: Architecture, layout: Layout, setting: str) -> list[str]:
    """megarlhf's emulation takes any number; megarlhf's te asks megatron-core, which counts within a stage."""
    most = architecture.num_layers // layout.pp
    return [
        f"{setting}: fp8.{name} is {vars(fp8)[name]}, and a stage has {most} layers; choose {most} or less"
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
        if vars(fp8)[name] > most
    ]


def unaligned(linears: Linears, architecture: Architecture, layout: Layout) -> list[str]:
    """Dimensions of which a block of 128 hangs over the edge: it works, but scales then depend on tp, and speed falls.

    Of the blockwise recipe only; empty otherwise.
    """
    if not linears.is_te_fp8 or linears.fp8.recipe != "blockwise":
        return []
    return [f"{size:g} {name}" for name, size in sizes(architecture, layout).items() if size % BLOCK]


def sizes(architecture: Architecture, layout: Layout) -> dict[str, float]:
    """Rows and columns of a rank's share of the layers' products, by what they are."""
    heads, groups = architecture.num_heads, architecture.num_kv_groups
    return {
        "hidden columns": architecture.hidden_size,
        "feed-forward columns": architecture.ffn_hidden_size / layout.tp,
        "columns of attention's output": heads * architecture.head_dim / layout.tp,
        "rows of query, key and value": (heads + 2 * groups) * architecture.head_dim / layout.tp,
    }
