"""Trains one model: micro-batches through the pipeline, gradients summed over ranks, one guarded optimizer step.

The learner knows no algorithm. It is given a loss on flat token tensors, divides nothing, and reports what happened.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer

from megarlhf import device
from megarlhf.algorithms.schedule import learning_rate
from megarlhf.config.settings import Optimizer
from megarlhf.engines.gradient_norm import gradient_norm
from megarlhf.engines.gradients import Gradients, clip_gradients
from megarlhf.engines.pipeline import MicroBatch, micro_batches, run_pass
from megarlhf.engines.routing import routing_metrics
from megarlhf.errors import TrainingError
from megarlhf.models.build import Model
from megarlhf.models.forward import values, vocabulary_logprobs
from megarlhf.models.precision.emulated import advance_scales
from megarlhf.parallel.groups import seed_dropout
from megarlhf.parallel.rows import gather_objects
from megarlhf.records.experience import Experience
from megarlhf.records.metrics import Metric, merge_metrics, metric_vectors, metrics_from_vectors
from megarlhf.records.packing import PackedRows
from megarlhf.records.seeds import derive_seed
from megarlhf.records.tokens import Denominators, Prediction, TokenBatch

_log = logging.getLogger(__name__)

Loss = Callable[[Prediction, TokenBatch, Denominators], tuple[torch.Tensor, dict[str, Metric]]]
"""(what the model says about the micro-batch's valid tokens, those tokens, denominators) -> (loss, metrics)."""


@dataclass(frozen=True)
class Objective:
    """A loss, and how what it reads is taken from the model."""

    loss: Loss
    temperature: float = 1.0
    """Divides logits, never values."""
    with_entropy: bool = False
    """Predictions of a vocabulary head hold the entropy of each token's distribution."""
    keeps_groups: bool = False
    """The rows of a prompt group stay in one micro-batch."""
    value_at: Literal["before", "token"] = "before"
    """A value head is read before the masked token, or at it."""


@dataclass(frozen=True)
class Part:
    """Rows (the same on every rank, or on those of a shard of the minibatch) and what they are trained on."""

    experience: Experience
    objective: Objective


@dataclass(frozen=True)
class Update:
    """What one call of `Learner.update` did: the reduced metrics, the gradient norm, whether weights changed."""

    metrics: dict[str, Metric]
    gradient_norm: float
    applied: bool


class Learner:
    """A model, its gradients and its optimizer. All methods are collective over the world."""

    def __init__(
        self,
        model: Model,
        settings: Optimizer,
        *,
        total_updates: int,
        max_tokens: int,
        max_skipped: int = 3,
        dropout_seed: int | None = None,
        balance_coef: float = 0.0,
    ):
        """`model` holds its weights already: the optimizer copies them.

        `max_skipped` non-finite updates in a row raise TrainingError. `dropout_seed`, where the model has dropout: each
        update draws from a stream of its own, so that a resumed run draws what it would have drawn. `balance_coef`
        times the load-balancing loss of a model with experts is added to every update.
        """
        if model.tally:
            model.tally.balance_coef = balance_coef
        self.model = model
        self.settings = settings
        self.total_updates = total_updates
        self.max_tokens = max_tokens
        self.max_skipped = max_skipped
        self.dropout_seed = dropout_seed
        self.num_updates = 0
        self.num_skipped = 0
        self.skipped_in_a_row = 0
        self.require_resident: Callable[[], None] = lambda: None
        """Raises when weights, gradients or optimizer are not on the device; set by whoever moves them."""
        self._losses: list[tuple[torch.Tensor, list[int]]] = []
        """(loss, rows of the data) of each micro-batch of the last update on this rank."""
        self._chunks = [Gradients(model, chunk) for chunk in model.chunks]
        self._optimizer = _build_optimizer(model, self._chunks, settings)
        model.config.finalize_model_grads_func = _sum_gradients

    @property
    def optimizer(self) -> ChainedOptimizer:
        """Main weights and moments, a shard of each parameter on each data-parallel rank."""
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return learning_rate(self.num_updates, self.total_updates, self.settings)

    def gradient_buffers(self) -> list[torch.Tensor]:
        """The flat buffers that every `main_grad` is a view of; what they hold outlives no update."""
        buffers = [buffer for chunk in self._chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return [buffer.grad_data for buffer in buffers]

    def optimizer_state(self) -> list[torch.Tensor]:
        """Moments and, where weights are bfloat16, float32 masters; moments begin with the first update.

        Step counters, which are single numbers, are not among them.
        """
        found: list[torch.Tensor] = []
        for part in self._optimizer.chained_optimizers:
            found += [shard for group in part.shard_fp32_from_float16_groups for shard in group if shard is not None]
            found += [value for state in part.optimizer.state.values() for value in state.values() if value.dim()]
        return found

    def update(self, parts: Sequence[Part]) -> Update:
        """One optimizer step on the sum of the parts' losses, or a skipped one if a gradient is not finite.

        Each part is one global minibatch, whose loss is divided by its own denominators.
        """
        return self.apply(self.accumulate(parts))

    def apply(self, metrics: dict[str, Metric]) -> Update:
        """The optimizer step on accumulated gradients; `metrics` are passed on in the result."""
        norm, applied = self._step()
        self.model.weights_changed()
        advance_scales(self.model.chunks, self.model.groups.collection.tp_dp_cp)
        self.num_skipped += not applied
        self.skipped_in_a_row = 0 if applied else self.skipped_in_a_row + 1
        if not applied:
            self._report_skipped(norm)
        return Update(metrics, norm, applied)

    def _report_skipped(self, norm: float) -> None:
        """Says which rows had no finite loss; raises TrainingError on all ranks after too many skips in a row."""
        mine = [row for loss, rows in self._losses if not math.isfinite(float(loss)) for row in rows]
        rows = sorted({row for found in gather_objects(mine, self.model.groups.world) for row in found})
        where = (
            f"the loss is not finite in micro-batches with the rows {rows[:16]} of the data" if rows else
            "every loss is finite, a gradient overflowed"
        )  # fmt: skip
        if self.skipped_in_a_row >= self.max_skipped:
            raise TrainingError(
                f"{self.skipped_in_a_row} updates in a row had a gradient that is not finite (norm {norm}); none was "
                f"applied; {where}. Lower the learning rate, or look at the samples and scores of this step"
            )
        if self.model.groups.rank == 0:
            _log.warning("an update was skipped, its gradient is not finite (norm %s): %s", norm, where)

    def accumulate(self, parts: Sequence[Part], *, complete_gradients: bool = False) -> dict[str, Metric]:
        """Gradients of the whole parts in `main_grad`; returns the reduced metrics.

        A data-parallel rank has only the shard that its optimizer steps, unless `complete_gradients`.
        """
        self.require_resident()
        if self.dropout_seed is not None:
            number = self.num_updates + self.num_skipped
            seed_dropout(self.model.groups, derive_seed(self.dropout_seed, "dropout", number))
        with device.labelled("optimizer"):
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
                chunk.train()
            self._optimizer.zero_grad()
        self._losses.clear()
        if self.model.tally:
            num_rows = sum(part.experience.num_rows for part in parts)
            self.model.tally.start(int(self.model.groups.shard.sum(torch.tensor(num_rows))))
        batches = [batch for number, part in enumerate(parts) for batch in self._micro_batches(part, number)]
        outputs = run_pass(
            self.model, self._chunks, batches, self._head(parts), train=True, complete_gradients=complete_gradients
        )
        metrics = _reduce(outputs, self.model)
        return metrics | routing_metrics(self.model) if self.model.tally else metrics

    def _micro_batches(self, part: Part, number: int) -> list[MicroBatch]:
        objective = part.objective
        batches = micro_batches(
            part.experience,
            self.model,
            self.max_tokens,
            keeps_groups=objective.keeps_groups,
            reads="rows" if _reads_token(self.model, objective) else "before",
        )
        return [replace(batch, part=number) for batch in batches]

    def _head(self, parts: Sequence[Part]):
        denominators = [Denominators.of(part.experience, self.model.groups.shard) for part in parts]

        def head(hidden: torch.Tensor, batch: MicroBatch):
            part = parts[batch.part]
            prediction = _predict(self.model, part.objective, hidden, batch.packed)
            tokens = TokenBatch.from_experience(part.experience.select(list(batch.rows))).to(hidden.device)
            loss, metrics = part.objective.loss(prediction, tokens, denominators[batch.part])
            self._losses.append((loss.detach(), part.experience.row_id[list(batch.rows)].tolist()))
            return loss + 0.0 * hidden.sum(), metrics  # an empty micro-batch still sends gradients down the pipeline

        return head

    @device.labelled("optimizer")
    @torch.no_grad()
    def _step(self) -> tuple[float, bool]:
        """Clips and applies. The norm spans the world, so that all ranks skip together."""
        optimizer = self._optimizer
        optimizer.prepare_grads()
        norm = gradient_norm(optimizer, self.model.groups.world)
        if not math.isfinite(norm):
            return norm, False
        for part in optimizer.chained_optimizers:
            for group in part.param_groups:
                group["lr"] = self.learning_rate
            parameters = part.get_parameters()
            if self.settings.clip_grad > 0 and parameters:
                clip_gradients(parameters, self.settings.clip_grad, norm)
        optimizer.step_with_ready_grads()
        self.num_updates += 1
        return norm, True


def _predict(model: Model, objective: Objective, hidden: torch.Tensor, packed: PackedRows) -> Prediction:
    if model.head == "value":
        at = packed.target_positions if _reads_token(model, objective) else packed.logit_positions
        return Prediction(values(model, hidden, at))
    logp, entropy = vocabulary_logprobs(
        model, hidden, packed.logit_positions, packed.targets, objective.temperature, objective.with_entropy
    )
    return Prediction(logp, entropy)


def _reads_token(model: Model, objective: Objective) -> bool:
    """The head is read at the masked tokens, not before them."""
    return model.head == "value" and objective.value_at == "token"


def _build_optimizer(model: Model, chunks: list[Gradients], settings: Optimizer):
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.learning_rate,
        min_lr=settings.min_learning_rate,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.epsilon,
        clip_grad=settings.clip_grad,
        bf16=model.config.bf16,
        params_dtype=model.config.params_dtype,
        fp8_recipe=model.config.fp8_recipe if model.config.fp8 else None,
        use_distributed_optimizer=True,
    )
    collection = model.groups.collection
    with device.using_adam(device.best_adam(has_te_layers=model.linears.layers == "te")):
        optimizer = get_megatron_optimizer(config, chunks, pg_collection=collection, use_gloo_process_groups=False)
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.AdamW):  # one pass over the numbers in place of ten
            for group in part.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False
    return optimizer


def _sum_gradients(chunks, _num_tokens, *, pg_collection, force_all_reduce):
    # No token count: losses are already divided by the denominator of the whole minibatch.
    finalize_model_grads(chunks, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)


def _reduce(outputs: list[dict[str, Metric]], model: Model) -> dict[str, Metric]:
    """Metrics of all micro-batches and data-parallel ranks, the same on every rank. Collective over dp, then pp."""
    groups = model.groups
    message: list = [None]
    if groups.is_last_stage:
        metrics = merge_metrics(outputs)
        addends, maxima = (vector.to(device.current()) for vector in metric_vectors(metrics))
        dist.all_reduce(addends, group=groups.dp)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=groups.dp)
        message = [metrics_from_vectors(metrics, addends, maxima)]
    if groups.layout.pp > 1:
        dist.broadcast_object_list(message, group_src=groups.layout.pp - 1, group=groups.pp)
    return message[0]
