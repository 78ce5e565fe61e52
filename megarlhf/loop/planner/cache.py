"""Bytes of the generator: keys and values of the sequences in flight, and what a rollout works with beside them."""

import math

from megarlhf.config.settings import Precision
from megarlhf.loop.planner.models import PlannedModel
from megarlhf.loop.planner.sizes import rank_parameters
from megarlhf.loop.planner.workload import Workload
from megarlhf.models.architecture import kv_cache_shape, padded_vocab
from megarlhf.parallel.grid import Coordinates
from megarlhf.weights.transfers import ITEM_BYTES

PREFILL_TOKENS = 4096
"""Prompt tokens, padded, of one prefill (`engines.generator.Generator`)."""
CHOICE_COPIES = 4
"""float32 copies of the logits while a token is chosen: as the head gives them, divided, noise, their sum."""


def cache_bytes(model: PlannedModel, pp_rank: int, num_slots: int, capacity: int, *, on_gpu: bool) -> int:
    """The cache of one stage, of `num_slots` sequences of at most `capacity` tokens (engines/generator/cache.py)."""
    return _kv_bytes(model, pp_rank, num_slots, capacity, model.dtype if on_gpu else "float32")


def _kv_bytes(model: PlannedModel, pp_rank: int, num_slots: int, capacity: int, dtype: Precision) -> int:
    """Keys and values of one stage in `dtype`."""
    return math.prod(kv_cache_shape(model.architecture, model.layout, pp_rank, num_slots, capacity)) * ITEM_BYTES[dtype]


def rollout_bytes(model: PlannedModel, pp_rank: int, work: Workload, dp: int) -> int:
    """Most that a rollout holds beside weights and cache: prefilled prompts, twice while stacked; or logits."""
    slots, rows = work.slots(dp), padded_vocab(model.architecture, model.layout) // model.layout.tp
    num_prompts = max(1, min(PREFILL_TOKENS // max(work.prompt, 1), math.ceil(work.num_prompts / dp)))
    prefilled = 2 * _kv_bytes(model, pp_rank, num_prompts, work.prompt, model.dtype)
    choosing = CHOICE_COPIES * 4 * slots * rows if pp_rank == model.layout.pp - 1 else 0
    return max(prefilled, choosing)


def packed_bytes(model: PlannedModel, at: Coordinates) -> int:
    """The copy of the linears' weights that a CPU multiplies faster with (engines/generator/steps.py)."""
    linears = (
        "linear_qkv.weight",
        "linear_proj.weight",
        "linear_fc1.weight",
        "linear_fc2.weight",
        "output_layer.weight",
    )
    (chunk,) = rank_parameters(model, at)
    is_tied_here = model.architecture.tied and model.layout.pp == 1
    names = (*linears, "word_embeddings.weight") if is_tied_here else linears
    dense = [one for one in chunk if one.name.endswith(names) and not one.is_expert]
    if model.architecture.mixture:  # a layer with experts runs by its modules
        dense = [one for one in dense if "layers." not in one.name]
    return sum(one.num_bytes for one in dense)
