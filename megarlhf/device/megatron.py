"""What differs between megatron-core 0.16.1 and 0.19.2, and what both say that a user of this project cannot act on."""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from megarlhf.device.packages import can_import, has_fused_weight_gradients, has_real_apex

Adam = Literal["te", "apex", "torch"]

_WARNINGS = (
    "Apex is not installed",
    "Transformer Engine and Apex are not installed",  # the choice of this project's CPU environments
    "full scope is deprecated",  # both: their own default of cuda_graph_scope / cuda_graph_modules
    "The .grad attribute of a Tensor that is not a leaf",  # both: their optimizer looks at every parameter's .grad
    "`torch.distributed.reduce_scatter_tensor` is deprecated",  # both: their collectives under torch 2.13
    "`torch.distributed.all_gather_into_tensor` is deprecated",  # likewise
    "mxfp8 without using reuse_grad_buf_for_mxfp8_param_ag",  # both: it takes weights to be eight-bit ones
    "MimoModelConfig is experimental",  # 0.19.2: imported whether used or not
)
_LOGGED = {
    # On CPU one generator is both the CPU's and the tracker's, so this is always so, and the tracker restores it.
    "megatron.core.tensor_parallel.random": "CPU RNG state changed within GPU RNG context",
    # 0.16.1: says so of every class that is not its own; it then builds the module as asked (models/moe.py).
    "megatron.core.transformer.transformer_layer": "Unknown MLP type",
    # 0.19.2: the layout that DDP then computes is the right one.
    "megatron.core.distributed.distributed_data_parallel": "full_param_layout not provided",
    # 0.19.2: announces HybridModel as the successor each time a GPTModel is built; both run the same layers.
    "megatron.core.models.gpt.gpt_model": "HybridModel",
}


def quieten() -> None:
    """Drop, by their words, the warnings and log lines listed above; everything else is still shown."""
    for words in _WARNINGS:
        pattern = re.escape(words)
        warnings.filterwarnings("ignore", message=f".*{pattern}")
    for logger, words in _LOGGED.items():
        logging.getLogger(logger).addFilter(_without(words))


def _without(words: str):
    """A logging filter that drops records holding `words`."""

    def keeps(record: logging.LogRecord) -> bool:
        return words not in record.getMessage()

    return keeps


def version() -> tuple[int, int]:
    """(major, minor) of the installed megatron-core, for the few places that have to choose."""
    from megatron.core import __version__

    major, minor = __version__.split(".")[:2]
    return int(major), int(minor)


def gradients_for_norm(optimizer) -> list:
    """The main gradients of one megatron-core optimizer that count in the norm: shared and replicated ones once."""
    if hasattr(optimizer, "get_grads_for_grad_norm"):  # 0.19.2, where its name no longer says "main"
        return optimizer.get_grads_for_grad_norm()
    return optimizer.get_main_grads_for_grad_norm()


def fuses_weight_gradients() -> bool:
    """megatron-core's linears can add weight gradients up in their products: apex's kernel is here, and a GPU."""
    return torch.cuda.is_available() and has_fused_weight_gradients()


def best_adam(*, has_te_layers: bool) -> Adam:
    """Whose Adam updates a model, by what is really installed: Transformer Engine's beside its layers, apex's, torch's.

    Transformer Engine's is left alone unless its layers are asked for: that it is installed changes no other run.
    """
    if has_te_layers and can_import("transformer_engine"):
        return "te"
    return "apex" if torch.cuda.is_available() and has_real_apex() else "torch"


@contextmanager
def using_adam(kind: Adam) -> Iterator[None]:
    """Optimizers that megatron-core builds inside the block are of this Adam; by itself it takes the first that it
    can import, Transformer Engine's before apex's before torch's."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    before = optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER, distrib_optimizer.Adam
    chosen = _adam(kind)
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER, distrib_optimizer.Adam = chosen, kind == "torch", chosen
    try:
        yield
    finally:
        optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER, distrib_optimizer.Adam = before


def _adam(kind: Adam) -> type[torch.optim.Optimizer]:
    if kind == "te":
        from transformer_engine.pytorch.optimizers import FusedAdam

        return FusedAdam
    if kind == "apex":
        from apex.optimizers import FusedAdam

        return FusedAdam
    return torch.optim.AdamW
