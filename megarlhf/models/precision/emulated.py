"""Emulated FP8 linears: products of dequantised eight-bit numbers, summed in float32, on any device.

They say what FP8 does to the numbers, and nothing about speed or memory: they are slower than what they stand for.
Their parameters, and so their checkpoints, are those of megatron-core's parallel linears.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megarlhf.config.precision import FP8
from megarlhf.models.precision.linears import Linears
from megarlhf.models.precision.quantise import E4M3
from megarlhf.models.precision.recipe import Histories, Operand, gradient_format, operand


class State:
    """What one linear keeps between calls: its quantised weight, and delayed scaling's histories.

    A kept weight is what makes several micro-batches, or tokens, cheap; and it is stale once the weight has changed,
    until `forget_weights` is called. Transformer Engine's layers do the same.
    """

    def __init__(self, settings: FP8, *, keeps_weights: bool = True):
        self.settings = settings
        self.keeps_weights = keeps_weights
        self.histories = Histories.empty(settings.amax_history) if settings.recipe == "delayed" else None
        self.kept: Operand | None = None

    def weight(self, weight: Tensor) -> Operand:
        """The quantised weight [rows, columns], kept from an earlier call if there is one."""
        if self.kept is not None:
            return self.kept
        history = self.histories.weight if self.histories else None
        quantised = operand(weight.detach(), self.settings, E4M3, is_weight=True, history=history)
        self.kept = quantised if self.keeps_weights else None
        return quantised

    def input(self, values: Tensor) -> Operand:
        """Activations [tokens, columns]."""
        history = self.histories.input if self.histories else None
        return operand(values, self.settings, E4M3, is_weight=False, history=history)

    def gradient(self, values: Tensor) -> Operand:
        """Gradients of the output [tokens, rows]."""
        history = self.histories.gradient if self.histories else None
        return operand(values, self.settings, gradient_format(self.settings), is_weight=False, history=history)


class _Product(torch.autograd.Function):
    """x [tokens, columns], weight [rows, columns] -> [tokens, rows] in x's precision, all three products in FP8."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, state: State) -> Tensor:
        quantised, kept = state.input(x), state.weight(weight)
        ctx.state, ctx.dtypes = state, (x.dtype, weight.dtype)
        ctx.input, ctx.weight = quantised.over_rows, kept.over_rows
        return (quantised.over_columns.dequantised() @ kept.over_columns.dequantised().t()).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        of_output, (x_dtype, weight_dtype) = ctx.state.gradient(gradient), ctx.dtypes
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = (of_output.over_columns.dequantised() @ ctx.weight.dequantised()).to(x_dtype)
        if ctx.needs_input_grad[1]:
            to_weight = (of_output.over_rows.dequantised().t() @ ctx.input.dequantised()).to(weight_dtype)
        return to_x, to_weight, None


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, state: State) -> Tensor:
    """x [..., columns] -> [..., rows], as torch's `linear`; the bias is added in x's precision."""
    flat = _Product.apply(x.reshape(-1, x.shape[-1]), weight, state)
    result = flat.unflatten(0, x.shape[:-1])
    return result if bias is None else result + bias


class Emulated:
    """What an emulated linear computes with, in place of megatron-core's `_forward_impl`, and what it keeps."""

    def __init__(self, settings: FP8, *, keeps_weights: bool = True):
        self.state = State(settings, keeps_weights=keeps_weights)

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        sequence_parallel: bool = False,
        allreduce_dgrad: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        **_of_fused_kernels,
    ) -> Tensor:
        """Communicates over tp_group as megatron-core's function does: a column-parallel linear gathers its input with
        sequence parallelism, and sums the input's gradient without."""
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        return fp8_linear(input, weight, bias, self.state)


def emulate(block: torch.nn.Module, linears: Linears, num_layers: int) -> None:
    """Makes the parallel linears of a block's layers compute in emulated FP8.

    `num_layers` are those of the whole model, whose first and last ones may be left as they are. `_forward_impl` is the
    one seam of megatron-core's linears, the same in both versions; parameters stay what they are.
    """
    settings = linears.fp8
    first, end = settings.num_layers_at_start_in_bf16, num_layers - settings.num_layers_at_end_in_bf16
    for layer in block.layers:
        if first < layer.layer_number <= end:
            for part in layer.modules():
                if isinstance(part, ColumnParallelLinear | RowParallelLinear):
                    part._forward_impl = Emulated(settings, keeps_weights=not linears.is_frozen)


def named_states(module: torch.nn.Module) -> Iterator[tuple[str, State]]:
    """Of every emulated linear below `module`, with its name there."""
    for name, part in module.named_modules():
        if isinstance(part, ColumnParallelLinear | RowParallelLinear) and isinstance(part._forward_impl, Emulated):
            yield name, part._forward_impl.state


def states(module: torch.nn.Module) -> Iterator[State]:
    """Of every emulated linear below `module`."""
    return (state for _, state in named_states(module))


def forget_weights(chunks: Iterable[torch.nn.Module]) -> None:
    """Forgets the quantised copies that linears keep of their weights."""
    for chunk in chunks:
        for state in states(chunk):
            state.kept = None


def advance_scales(chunks: Iterable[torch.nn.Module], group: dist.ProcessGroup) -> None:
    """Ends a training step of delayed scaling. Collective over `group`; nothing under other recipes."""
    for chunk in chunks:
        for state in states(chunk):
            if state.histories is not None:
                state.histories.advance(state.settings, group)
