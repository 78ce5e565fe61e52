"""Score, loss, gradients and one optimizer step of a model under one layout, as whole tensors that can be compared.

Everything is float32, without dropout and adapters, so that what differs between two layouts is rounding or a mistake.
"""

import gc
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.config.settings import Optimizer
from megarlhf.config.verification import Case
from megarlhf.engines.learner import Learner, Objective, Part
from megarlhf.engines.scorer import LogprobScorer, ValueScorer
from megarlhf.loop.roles import Role
from megarlhf.loop.trace import Trace, trace, weights_of
from megarlhf.models.architecture import Architecture
from megarlhf.models.build import Model, build_model
from megarlhf.parallel.groups import build_groups
from megarlhf.records.experience import Experience
from megarlhf.records.metrics import metric_results
from megarlhf.records.seeds import derive_seed
from megarlhf.weights.boxes import num_elements, whole
from megarlhf.weights.checksum import weight_checksums
from megarlhf.weights.gather import gather
from megarlhf.weights.load import load_weights
from megarlhf.weights.local_map import Key, hf_shapes
from megarlhf.weights.plan import BUCKET_BYTES, holdings
from megarlhf.weights.safetensors_file import shards

_AT_ONCE_BYTES = 2**28
"""Gathered tensors of the case at hand that the first rank holds at a time."""

_BLOCK_TOLERANCE = 1e-4
"""Relative difference of a block's sum of squares that rounding does not explain."""


@dataclass(frozen=True)
class Trial:
    """A model, and what it is trained on for one step."""

    role: Role
    batch: Experience
    objective: Objective
    optimizer: Optimizer


@dataclass(frozen=True)
class Measured:
    """What one case gave. Tensors by Hugging Face name are whole, in host memory, and on the first rank only."""

    scores: Tensor
    """[M] float32: log-prob of every valid token, or the value before it."""
    loss: float
    gradient_norm: float
    checksums: Mapping[str, int]
    """Of the weights before the step."""
    blocks: Trace
    """Sizes of the layers' outputs."""
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    """After the step."""


@dataclass(frozen=True)
class Gaps:
    """How far a case is from the one that it is compared with. Gradients and weights by Hugging Face name."""

    scores: float
    """Largest difference: nats of a log-prob, or of a value."""
    loss: float
    """Relative to the larger of 1 and the loss."""
    gradient_norm: float
    """Relative to it."""
    misplaced: tuple[str, ...]
    """Weights that differ before the step: they were not read, or not cut, alike."""
    first_block: tuple[int, str] | None
    """The first (layer, block) whose output has another size."""
    block_weights: tuple[str, ...]
    """The weights of that block."""
    gradients: Mapping[str, float]
    """Norm of each gradient's difference, relative to the norm of all gradients."""
    own_gradients: Mapping[str, float]
    """The same relative to the gradient's own norm: the larger, the nearer to the cause."""
    weights: Mapping[str, float]
    """Root mean square difference after the step, in learning rates."""


def measure(trial: Trial, case: Case, expected: Measured | None) -> Measured | Gaps:
    """Compute the trial under a case. Collective over the world, which has `case.num_ranks` ranks.

    Without `expected` the first rank gets everything; with it (what the first rank got; anything elsewhere) the
    differences. Other ranks get results without tensors.
    """
    model = _model(trial, case)
    world, checksums = model.groups.world, weight_checksums(model, torch.float32, model.groups.world)
    scores, blocks = _scores(trial, model, case.micro_batch_tokens), trace(model, trial.batch, case.micro_batch_tokens)
    optimizer = replace(trial.optimizer, warmup_updates=0)
    learner = Learner(model, optimizer, total_updates=2, max_tokens=case.micro_batch_tokens)
    parts = [Part(trial.batch, trial.objective)]
    learner.accumulate(parts, complete_gradients=True)
    is_reference, is_first = expected is None, dist.get_rank(world) == 0
    # megatron-core hangs main_grad on a parameter
    main_gradients = {key: one.main_grad for key, one in model.named_parameters().items()}  # type: ignore[attr-defined]
    gradients = _Sink(None if is_reference else expected.gradients)
    gradients.take(_gathered(model, main_gradients))
    update = learner.update(parts)
    weights = _Sink(None if is_reference else expected.weights)
    weights.take(_gathered(model, model.named_parameters()))
    loss = sum(value for name, value in metric_results(update.metrics).items() if name.startswith("loss/"))
    found = Measured(scores, loss, update.gradient_norm, checksums, blocks, gradients.kept, weights.kept)
    architecture = model.architecture
    del model, learner
    gc.collect()  # hooks on parameters make cycles, and the next case needs the memory
    if is_reference or not is_first:
        return found
    first = _first_block(found.blocks, expected.blocks)
    of_block = weights_of(first, architecture, trial.role.head) if first else ()
    return _gaps(found, expected, (first, tuple(of_block)), gradients, weights, optimizer.learning_rate)


class _Sink:
    """Keeps whole tensors, or, given those that are expected, only the sums of squares of the differences."""

    def __init__(self, expected: Mapping[str, Tensor] | None):
        self.expected = expected
        self.kept: dict[str, Tensor] = {}
        self.squares: dict[str, float] = {}

    def take(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if self.expected is None:
                self.kept[name] = tensor
            else:
                self.squares[name] = float((tensor - self.expected[name]).double().square().sum())


def _gaps(
    found: Measured,
    expected: Measured,
    first: tuple[tuple[int, str] | None, tuple[str, ...]],
    gradients: _Sink,
    weights: _Sink,
    step: float,
) -> Gaps:
    norm = max(expected.gradient_norm, torch.finfo(torch.float32).tiny)
    own = {name: max(float(tensor.norm()), 1e-6 * norm) for name, tensor in expected.gradients.items()}
    return Gaps(
        scores=float((found.scores - expected.scores).abs().max()),
        loss=abs(found.loss - expected.loss) / max(1.0, abs(expected.loss)),
        gradient_norm=abs(found.gradient_norm - expected.gradient_norm) / norm,
        misplaced=tuple(name for name, sum_ in expected.checksums.items() if found.checksums[name] != sum_),
        first_block=first[0],
        block_weights=first[1],
        gradients={name: math.sqrt(square) / norm for name, square in gradients.squares.items()},
        own_gradients={name: math.sqrt(square) / own[name] for name, square in gradients.squares.items()},
        weights={
            name: math.sqrt(square / expected.weights[name].numel()) / step for name, square in weights.squares.items()
        },
    )


def _first_block(found: Trace, expected: Trace) -> tuple[int, str] | None:
    def differs(key: tuple[int, str]) -> bool:
        return not abs(found[key] - expected[key]) <= _BLOCK_TOLERANCE * expected[key]

    return next(filter(differs, expected), None)


def _model(trial: Trial, case: Case) -> Model:
    """The role's model in the case's layout. A value head that the folder does not have is drawn, not zero: behind a
    head of zeros no gradient would reach the layers."""
    role, groups = trial.role, build_groups(case.layout, case.num_ranks)
    architecture = Architecture.from_folder(role.folder)
    model = build_model(architecture, groups, head=role.head, dtype=torch.float32, seed=None)
    is_new_head = role.head == "value" and not architecture.num_labels
    load_weights(model, role.folder, new_value_head=is_new_head)
    if is_new_head and groups.is_last_stage:
        head = model.chunks[-1].value_head.weight
        generator = torch.Generator().manual_seed(derive_seed(0, "value head"))
        drawn = torch.randn(head.shape, generator=generator) / math.sqrt(architecture.hidden_size)
        head.data.copy_(drawn)
    return model


def _scores(trial: Trial, model: Model, max_tokens: int) -> Tensor:
    mask = trial.batch.mask
    if trial.role.head == "value":
        return ValueScorer(model, max_tokens).annotate(trial.batch).value[mask]
    scorer = LogprobScorer(model, "logp_reference", trial.objective.temperature, max_tokens)
    return scorer.annotate(trial.batch).logp_reference[mask]


def _gathered(model: Model, tensors: Mapping[Key, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors by Hugging Face name, a bounded part of them at a time, on the first rank (collective over the
    model's world); nothing elsewhere."""
    group, shapes = model.groups.world, hf_shapes(model.architecture, model.head)
    held = holdings(model.architecture, model.groups.layout, group.size(), model.head)
    device = next(iter(tensors.values())).device
    sizes = {name: 4 * num_elements(whole(shape)) for name, shape in shapes.items()}
    for names in shards(sizes, _AT_ONCE_BYTES).values():
        wanted = {name: shapes[name] for name in names}
        yield from gather(wanted, held, tensors, lambda _: "float32", group, device, BUCKET_BYTES).items()
