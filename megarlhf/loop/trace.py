"""How large the output of every attention and feed-forward block is, over all tokens: where a forward pass goes wrong.

The first block whose size differs between two layouts is where the split is broken; all later ones only follow.
"""

from bisect import bisect_right
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.config.layout import Layout
from megarlhf.engines.pipeline import MicroBatch, micro_batches, run_pass
from megarlhf.models.architecture import Architecture
from megarlhf.models.build import Model
from megarlhf.models.families import FAMILIES
from megarlhf.models.names import Head, stage_weights
from megarlhf.parallel.context import held_tokens
from megarlhf.records.experience import Experience
from megarlhf.records.packing import PackedRows

_BLOCKS = {"self_attention": ("self_attention.", "input_layernorm."), "mlp": ("mlp.", "pre_mlp_layernorm.")}
"""Modules of a layer in the order of their work, and how the local names of their weights begin."""

Trace = dict[tuple[int, str], float]
"""Sum of squares by (global layer, block), in the order of the network."""


@torch.no_grad()
def trace(model: Model, experience: Experience, max_tokens: int) -> Trace:
    """Run the layers forward, and measure. Collective over the model's world; the same result on every rank."""
    batches = micro_batches(experience, model, max_tokens)
    keys = [(layer, block) for layer in range(model.architecture.num_layers) for block in _BLOCKS]
    sums = torch.zeros(len(keys), dtype=torch.float64)
    hooks = []
    for chunk in model.chunks:
        chunk.eval()
        for layer in chunk.decoder.layers:
            for block in _BLOCKS:
                place = keys.index((layer.layer_number - 1, block))
                add = _adder(model, batches, sums[place])
                hooks.append(layer.get_submodule(block).register_forward_hook(add))
    run_pass(model, model.chunks, batches, lambda hidden, batch: None, train=False)
    for hook in hooks:
        hook.remove()
    sums = sums.to(next(iter(model.named_parameters().values())).device)
    dist.all_reduce(sums, group=model.groups.world)
    return dict(zip(keys, sums.tolist(), strict=True))


def weights_of(key: tuple[int, str], architecture: Architecture, head: Head) -> list[str]:
    """Hugging Face names of what a block is made of."""
    layer, block = key
    table = stage_weights(FAMILIES[architecture.family], architecture, Layout(), 0, 0, head)
    starts = tuple(f"decoder.layers.{layer}.{start}" for start in _BLOCKS[block])
    return [name for weight in table if weight.local.startswith(starts) for name in weight.hf]


def _adder(model: Model, batches: list[MicroBatch], total: Tensor) -> Callable:
    """A hook that adds its module's output to `total`: that of the tokens of each row, on one of the ranks that hold
    them."""
    calls = iter(batches)

    def add(module: torch.nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
        batch, hidden = next(calls), output[0] if isinstance(output, tuple) else output
        held, is_sp = _activations(model, batch), model.config.sequence_parallel
        if is_sp or model.groups.coordinates.tp == 0:
            rows_of = _rows_of_tokens(batch.packed).to(held.device)[held]
            total.add_((hidden[:, 0].double().square().sum(1) * rows_of).sum().cpu())

    return add


def _rows_of_tokens(packed: PackedRows) -> Tensor:
    """[N]: how many rows have each token of the stream in common; 0 for padding."""
    rows = torch.zeros(packed.input_ids.shape[1], dtype=torch.int64)
    starts = packed.cu_seqlens.tolist()
    for last in packed.last_positions.tolist():
        segment = bisect_right(starts, last) - 1
        prefix, num_tokens = packed.prefixes[segment]
        rows[starts[segment] : last + 1] += 1
        rows[prefix : prefix + num_tokens] += 1
    return rows


def _activations(model: Model, batch: MicroBatch) -> Tensor:
    """Places in the stream of the tokens whose activations this rank holds, in order."""
    context, ids = model.groups.cp, batch.packed.input_ids
    held = held_tokens(ids.shape[1], context.size(), context.rank()).to(ids.device)
    if model.config.sequence_parallel:
        held = held.chunk(model.groups.layout.tp)[model.groups.coordinates.tp]
    return held
