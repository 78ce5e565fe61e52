"""LoRA on tensor-parallel linears: y = W x + (alpha / rank) B A x, where W is frozen and B starts at zero.

Source: Hu et al. 2021, arXiv:2106.09685, equation 3. megatron-core fuses q, k, v and gate, up into one linear each; an
adapter here is the separate adapters of those projections, side by side: their A one below the other, and for every
row of the fused weight the row of B of the projection that the row belongs to. So it is the function that PEFT's
adapters of q_proj, k_proj, ... compute, under every layout.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor
from torch.nn import Parameter

from megarlhf.config.layout import Layout
from megarlhf.config.lora import LoRA, lora_violations
from megarlhf.errors import ConfigError
from megarlhf.models.build import Model
from megarlhf.models.families import FAMILIES
from megarlhf.models.names import Cut, Weight, adapted, module_of, row_sources, stage_weights
from megarlhf.records.seeds import derive_seed

Key = tuple[int, str]
"""(model chunk, parameter name in the chunk)."""


class Adapter(torch.nn.Module):
    """The adapters on one linear of this rank: K projections of rank r beside a weight [rows, columns] (both local).

    a [K * r, columns]: their A, one below the other. Whole on every tensor rank of a column-parallel linear, cut by
    columns like the weight of a row-parallel one.
    b [rows, r]: for each row of the weight its row of B. Cut like the rows of the weight; zero, and without gradient,
    for rows of projections that have no adapter.
    """

    def __init__(self, model: Model, weight: Weight, beside: Tensor, lora: LoRA):
        """`beside` is the weight of the linear; `weight` says what it is made of."""
        super().__init__()
        groups, config = model.groups, model.config
        self.projections = adapted(weight, lora)
        """Hugging Face names of the adapted projections' weights."""
        self.scale = lora.alpha / lora.rank
        self.is_enabled = True
        self.is_row_parallel = weight.cut is Cut.COLUMNS
        self.sequence_parallel = config.sequence_parallel
        self.group = groups.tp
        rows, columns = beside.shape
        self.a = Parameter(beside.new_zeros(len(self.projections) * lora.rank, columns))
        self.b = Parameter(beside.new_zeros(rows, lora.rank))
        sources = row_sources(weight, model.architecture, groups.layout.tp, groups.coordinates.tp)
        owner = torch.tensor([[weight.hf[place] == name for name in self.projections] for place in sources])
        self.register_buffer("owner", owner.to(beside), persistent=False)
        self._mark()

    def _mark(self) -> None:
        """What megatron-core asks of a parameter: is it cut over tensor ranks, and must they sum its gradient."""
        cut, dim, shared = (self.a, 1, self.b) if self.is_row_parallel else (self.b, 0, self.a)
        set_tensor_model_parallel_attributes(cut, is_parallel=True, dim=dim, stride=1)
        # With sp a rank's gradient of the other one comes from its 1/tp of the tokens. Without, it is whole (`inner`).
        shared.sequence_parallel = self.sequence_parallel

    @property
    def rank(self) -> int:
        """r."""
        return self.b.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the linear's output. Communicates over tp.

        x is the linear's input, its result shaped like the linear's output, both as the layout divides them.
        """
        return self.scale * F.linear(self.inner(x), self.spread())

    def inner(self, x: Tensor) -> Tensor:
        """A x, [.., K * r], summed over the columns of all tensor ranks. Communicates over tp.

        The collectives act here, where K * r numbers a token travel rather than H. Without sp they leave whole
        gradients of a column-parallel A, and of a row-parallel B, on every rank; with sp, those of a rank's tokens.
        """
        partial = F.linear(x, self.a)
        if self.is_row_parallel:
            enter = (
                reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
            return enter(partial, group=self.group)
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(partial, tensor_parallel_output_grad=True, group=self.group)
        return copy_to_tensor_model_parallel_region(partial, group=self.group)

    def spread(self) -> Tensor:
        """B as one matrix [rows, K * r]: each row's numbers in the columns of its own projection, zero elsewhere."""
        return (self.owner[:, :, None] * self.b[:, None, :]).flatten(1)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """weight + (alpha / rank) B A in a new tensor of its dtype [rows, columns]; added up in float32."""
        return (weight.float() + self.scale * (self.spread().float() @ self.a.float())).to(weight.dtype)


def add_lora(model: Model, lora: LoRA, seed: int = 0) -> None:
    """Freeze `model` and put adapters on its linears; a value head stays trainable, as in PEFT.

    Call it before the learner is built, whose gradients and optimizer state then cover the trainable parameters only.
    A is drawn per projection from (seed, name), uniform in +-1/sqrt(columns) as in PEFT, the same under every layout.
    Raises ConfigError for settings that cannot be.
    """
    problems = lora_violations(lora, "lora")
    if problems or not lora.rank:
        raise ConfigError(problems or "lora.rank: 0 adds no adapters; choose 1 or more")
    _require_linears(model, lora)
    assert not adapters(model), "the model has adapters already"
    for chunk in model.chunks:
        chunk.requires_grad_(False)
    if model.head == "value" and model.groups.is_last_stage:
        model.chunks[-1].value_head.requires_grad_(True)
    architecture, groups = model.architecture, model.groups
    family = FAMILIES[architecture.family]
    for index, chunk in enumerate(model.chunks):
        place = groups.coordinates
        for weight in stage_weights(family, architecture, groups.layout, place.pp, index, model.head, place.ep):
            if adapted(weight, lora):
                linear = chunk.get_submodule(weight.local.removesuffix(".weight"))
                linear.adapter = Adapter(model, weight, linear.weight, lora)
                linear.register_forward_hook(_add_adapter, prepend=True)
                _initialise(linear.adapter, seed, groups.coordinates.tp)


def _require_linears(model: Model, lora: LoRA) -> None:
    """Every target is a linear layer of this model."""
    layer = FAMILIES[model.architecture.family].layer
    linears = {module_of(name): None for weight in layer if weight.is_linear for name in weight.hf}
    strangers = [name for name in lora.targets if name not in linears]
    if strangers:
        raise ConfigError(
            f"lora.targets: {', '.join(strangers)} are no linear layers of {model.architecture.family} models; "
            f"choose among {', '.join(linears)}"
        )
    everything = stage_weights(FAMILIES[model.architecture.family], model.architecture, Layout(), 0, 0, model.head)
    if not any(adapted(weight, lora) for weight in everything):
        raise ConfigError(
            f"lora.targets: {', '.join(lora.targets)} are experts in every layer of this model, which get no adapters; "
            "choose among q_proj, k_proj, v_proj, o_proj"
        )


def _add_adapter(linear: torch.nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]):
    result, bias = output
    return (result + linear.adapter(inputs[0]) if linear.adapter.is_enabled else result), bias


@torch.no_grad()
def _initialise(adapter: Adapter, seed: int, tp_rank: int) -> None:
    columns = adapter.a.shape[1]
    first, total = (tp_rank * columns, adapter.group.size() * columns) if adapter.is_row_parallel else (0, columns)
    for place, name in enumerate(adapter.projections):
        generator = torch.Generator().manual_seed(derive_seed(seed, "lora", name))
        whole = torch.empty(adapter.rank, total).uniform_(-(total**-0.5), total**-0.5, generator=generator)
        rows = slice(place * adapter.rank, (place + 1) * adapter.rank)
        adapter.a[rows].copy_(whole[:, first : first + columns])


def adapters(model: Model) -> dict[Key, Adapter]:
    """This rank's adapters by (chunk, name of the weight that each stands beside); none without LoRA."""
    return {
        (index, f"{name.removesuffix('adapter')}weight"): module
        for index, chunk in enumerate(model.chunks)
        for name, module in chunk.named_modules()
        if isinstance(module, Adapter)
    }


@contextmanager
def adapters_off(model: Model) -> Iterator[None]:
    """Inside the block the model computes what it did before `add_lora`: the reference, without a second copy.

    A trained value head is as it is: it has no second copy either.
    """
    found = adapters(model).values()
    before = [adapter.is_enabled for adapter in found]
    for adapter in found:
        adapter.is_enabled = False
    try:
        yield
    finally:
        for adapter, was_enabled in zip(found, before, strict=True):
            adapter.is_enabled = was_enabled


@torch.no_grad()
def merge_adapters(model: Model) -> None:
    """Adds each adapter to the weight beside it, for good, and switches it off: for models that are not trained."""
    weights = base_parameters(model)
    for key, adapter in adapters(model).items():
        weights[key].copy_(adapter.merged(weights[key]))
        adapter.is_enabled = False


def adapter_parameters(model: Model) -> dict[Key, Parameter]:
    """Parameters of the adapters by (chunk, name); empty without LoRA."""
    stems = {
        (chunk, f"{name.removesuffix('weight')}adapter."): found for (chunk, name), found in adapters(model).items()
    }
    return {
        (chunk, stem + name): parameter
        for (chunk, stem), adapter in stems.items()
        for name, parameter in adapter.named_parameters()
    }


def base_parameters(model: Model) -> dict[Key, Parameter]:
    """Parameters of the model itself, without its adapters."""
    ours = adapter_parameters(model)
    return {key: parameter for key, parameter in model.named_parameters().items() if key not in ours}


class MergedParameters(Mapping[Key, Tensor]):
    """The model's weights with adapters merged in, each computed when it is asked for. The model is not touched.

    Valid while the weights stay as they are: make one, use it, drop it. The last merged tensor is kept, because
    whoever moves weights asks for one box of a tensor after the other.
    """

    def __init__(self, model: Model):
        self._base = base_parameters(model)
        self._adapters = adapters(model)
        self._last: tuple[Key, Tensor] | None = None

    def __getitem__(self, key: Key) -> Tensor:
        if key not in self._adapters:
            return self._base[key]
        if self._last is None or self._last[0] != key:
            self._last = None  # let go of one tensor before the next is made
            self._last = key, self._adapters[key].merged(self._base[key])
        return self._last[1]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def merged_parameters(model: Model) -> Mapping[Key, Tensor]:
    """What `base_parameters` names, adapters merged in: for other layouts and for export. Without LoRA, the same."""
    return MergedParameters(model)
