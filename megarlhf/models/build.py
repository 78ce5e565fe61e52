"""Building a model: this rank's share of an architecture under the layout of its process groups."""

from dataclasses import dataclass

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from megarlhf.config.layout import Layout
from megarlhf.config.settings import Recompute
from megarlhf.errors import LayoutError
from megarlhf.models.architecture import Architecture, require_layout
from megarlhf.models.families import FAMILIES
from megarlhf.models.gpt import GPT
from megarlhf.models.head_styles import is_value_head
from megarlhf.models.moe import Tally
from megarlhf.models.names import Cut, Head, Weight, local_name, stage_weights
from megarlhf.models.precision import emulated, te
from megarlhf.models.precision.linears import LOCAL, Linears, te_violations
from megarlhf.models.transformer_config import transformer_config
from megarlhf.parallel.groups import Groups


@dataclass(frozen=True, eq=False)
class Model:
    """This rank's modules of one model. What changes (weights) lives in `chunks`; the rest says what they are."""

    architecture: Architecture
    groups: Groups
    head: Head
    chunks: list[GPT]
    config: TransformerConfig
    tally: Tally | None = None
    """What the routers count; of a model with experts."""
    linears: Linears = Linears()
    """What the layers compute with."""
    token_multiple: int = 1
    """What the tokens that a rank runs through the layers at once must be a multiple of."""

    def named_parameters(self) -> dict[tuple[int, str], Parameter]:
        """Every parameter of this rank by (chunk, name in the chunk); one entry for tied weights of one stage.

        Names are those of megatron-core's local layers, whatever the layers are: families know no others.
        """
        found = [(index, chunk.named_parameters()) for index, chunk in enumerate(self.chunks)]
        return {(index, local_name(name)): parameter for index, named in found for name, parameter in named}

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights (a value head is float32 whatever this says)."""
        return self.config.params_dtype

    def weights_changed(self) -> None:
        """To be called after every change of weights: FP8 linears forget the quantised copies that they keep."""
        emulated.forget_weights(self.chunks)
        te.forget_weights(self.chunks)

    def output_weight(self) -> Tensor:
        """[padded V/tp, H]: the vocabulary head's rows of this rank; on the last stage of a language model."""
        assert self.head == "vocabulary" and self.groups.is_last_stage, "this rank holds no vocabulary head"
        chunk = self.chunks[-1]
        tied_here = chunk.share_embeddings_and_output_weights and chunk.pre_process
        return chunk.embedding.word_embeddings.weight if tied_here else chunk.output_layer.weight

    def output_weight_gradient(self) -> Tensor | None:
        """[padded V/tp, H] float32: where gradients of `output_weight` are summed; None where nobody trains it."""
        return getattr(self.output_weight(), "main_grad", None)  # megatron-core's name, set once it is trained


def build_model(
    architecture: Architecture,
    groups: Groups,
    *,
    head: Head,
    dtype: torch.dtype,
    seed: int | None = 0,
    dropout: float = 0.0,
    recompute: Recompute = "none",
    linears: Linears = LOCAL,
) -> Model:
    """Build this rank's share on `device.current()`. Collective over the groups' world when embeddings are tied.

    Weights are random (normal with the config's initializer_range; norms 1, or 0 where a norm adds 1; biases and value
    head 0), drawn from `seed` and the tensor rank; with `seed` None they stay zero, for a model whose weights are about
    to be loaded. `dropout` acts on attention weights and residual branches while training; so does `recompute`, on what
    is kept for the backward pass.
    Raises LayoutError when the layout does not fit the architecture or its linears.
    """
    require_layout(architecture, groups.layout, "layout")
    problems = te_violations(linears, architecture, groups.layout, "layout")
    if problems:
        raise LayoutError(problems)
    config = transformer_config(architecture, groups.layout, dtype, dropout, recompute, linears)
    tally = Tally() if architecture.mixture else None
    chunks = [GPT(config, architecture, groups, head, index, tally, linears) for index in range(groups.layout.vp)]
    model = Model(architecture, groups, head, chunks, config, tally, linears, linears.token_multiple)
    if linears.layers == "emulated_fp8" and linears.fp8.is_on:
        for chunk in model.chunks:
            emulated.emulate(chunk.decoder, linears, architecture.num_layers)
    if seed is not None:
        _initialise(model, seed)
    return model


def _initialise(model: Model, seed: int) -> None:
    """Each weight is keyed by its Hugging Face name, so that copies of one weight (tied, or on dp ranks) are equal."""
    architecture, groups = model.architecture, model.groups
    family, layout, place = FAMILIES[architecture.family], groups.layout, groups.coordinates
    tables = [
        stage_weights(family, architecture, layout, place.pp, chunk, model.head, place.ep) for chunk in range(layout.vp)
    ]
    numbers = {name: number for number, name in enumerate(_all_names(model))}
    for chunk, weight in [(chunk, weight) for chunk, table in enumerate(tables) for weight in table]:
        parameter = model.named_parameters()[chunk, weight.local]
        if is_value_head(weight.hf[0]):
            parameter.data.zero_()
            continue
        if not weight.is_matrix:
            if weight.cut is Cut.WHOLE:
                parameter.data.fill_(0.0 if architecture.zero_centered_norms else 1.0)
            continue  # biases are built as zeros
        is_cut = weight.cut is not Cut.WHOLE and not weight.expert
        generator = torch.Generator(parameter.device)
        generator.manual_seed((seed * 1_000_003 + numbers[weight.hf[0]]) * 1_009 + (place.tp if is_cut else 0))
        parameter.data.normal_(0.0, architecture.initializer_range, generator=generator)
        _clear_padding(parameter.data, weight, architecture, groups.coordinates.tp)


def _clear_padding(rows: Tensor, weight: Weight, architecture: Architecture, tp_rank: int) -> None:
    if weight.cut is Cut.VOCABULARY:
        rows[max(architecture.vocab_size - tp_rank * rows.shape[0], 0) :].zero_()


def _all_names(model: Model) -> list[str]:
    """First Hugging Face name of every weight of the model, in one order on all ranks."""
    family = FAMILIES[model.architecture.family]
    return [weight.hf[0] for weight in stage_weights(family, model.architecture, Layout(), 0, 0, model.head)]
