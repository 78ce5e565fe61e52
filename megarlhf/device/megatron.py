"""What differs between megatron-core 0.16.1 and 0.19.2, and what both say that a user of this project cannot act on."""

import logging
import re
import warnings

_WARNINGS = (
    "Apex is not installed",
    "Transformer Engine and Apex are not installed",  # the choice of this project's CPU environments
    "full scope is deprecated",  # both: their own default of cuda_graph_scope / cuda_graph_modules
    "The .grad attribute of a Tensor that is not a leaf",  # both: their optimizer looks at every parameter's .grad
    "`torch.distributed.reduce_scatter_tensor` is deprecated",  # both: their collectives under torch 2.13
    "`torch.distributed.all_gather_into_tensor` is deprecated",  # likewise
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
