"""What a real model takes on a rank, read off its tensors' storages: the planner's independent answer."""

from collections.abc import Iterable

import torch

from megarlhf.config.layout import Layout
from megarlhf.config.lora import LoRA
from megarlhf.config.settings import Optimizer
from megarlhf.loop.planner.models import PlannedModel
from megarlhf.models.architecture import Architecture
from tests.engines.layouts import frozen_batch
from tests.tiny import tiny_config

NO_LORA = LoRA()


def planned(
    layout: Layout,
    head: str = "vocabulary",
    dtype: str = "float32",
    *,
    lora: LoRA = NO_LORA,
    recompute="none",
    **fields,
) -> PlannedModel:
    """A tiny model that is trained; `fields` are those of `tiny_config`."""
    architecture = Architecture.from_hf(tiny_config(num_labels=int(head == "value"), **fields))
    return PlannedModel(
        name="actor",
        folder="",
        architecture=architecture,
        layout=layout,
        head=head,
        dtype=dtype,
        setting="actor.train",
        is_trained=True,
        lora=lora,
        recompute=recompute,
    )


def build(model: PlannedModel, world_size: int):
    """The real learner of a planned model."""
    from megarlhf.engines.learner import Learner
    from megarlhf.models.build import build_model
    from megarlhf.models.lora import add_lora
    from megarlhf.parallel.groups import build_groups

    groups = build_groups(model.layout, world_size)
    real = build_model(
        model.architecture,
        groups,
        head=model.head,
        dtype=getattr(torch, model.dtype),
        recompute=model.recompute,
    )
    if model.lora.rank:
        add_lora(real, model.lora)
    return Learner(real, Optimizer(), total_updates=10, max_tokens=model.micro_batch_tokens)


def storages(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages that the tensors live in, each once."""
    return sum({one.data_ptr(): one.nbytes() for one in (tensor.untyped_storage() for tensor in tensors)}.values())


def learner_bytes(rank: int, world_size: int, model: PlannedModel) -> tuple[int, int, int, int]:
    """(one copy of the parameters, weights, gradients, optimizer state) after an update."""
    from tests.engines.test_learner import ppo_part

    learner = build(model, world_size)
    learner.update([ppo_part(frozen_batch(num_rows=4 * world_size), model.head)])
    parameters = list(learner.model.named_parameters().values())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    state = [
        tensor
        for part in learner._optimizer.chained_optimizers
        for states in part.optimizer.state.values()
        for name, tensor in states.items()
        if name != "step"
    ]
    masters = [
        tensor
        for part in learner._optimizer.chained_optimizers
        for group in part.shard_fp32_from_float16_groups
        for tensor in group
    ]
    return (
        sum(parameter.nbytes for parameter in parameters),
        storages(parameters),
        storages(parameter.main_grad for parameter in trained),
        storages([*state, *masters]),
    )
