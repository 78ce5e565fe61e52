"""The layer of experts: megarlhf's router in megatron-core's MoELayer, and what routers count while training.

megatron-core's dispatcher sends each token to the ranks of its experts (all to all over ep) and brings the weighted
outputs back; its SequentialMLP holds this rank's experts, as plain MLPs. The router is ours, so that its arithmetic is
transformers' to the letter, in float32, and the load-balancing loss does not depend on how rows are packed.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    checkpoint,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megarlhf.models.mixture import Mixture
from megarlhf.parallel.context import held_tokens
from megarlhf.parallel.groups import Groups


@dataclass
class Tally:
    """What the routers of one model count in training passes, by layer, since the last `start`; this rank's part.

    It also carries what they need to know of the pass: the coefficient of the load-balancing loss (0: none), and the
    number of sequences that the loss is averaged over, which is that of the whole update.
    """

    balance_coef: float = 0.0
    num_sequences: int = 1
    loads: dict[int, Tensor] = field(default_factory=dict)
    """[E] tokens that chose each expert."""
    entropies: dict[int, Tensor] = field(default_factory=dict)
    """Sum over tokens of the entropy of the router's distribution, in nats."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """This rank's part of the load-balancing loss, without its coefficient."""

    def start(self, num_sequences: int) -> None:
        """A new update, over `num_sequences` sequences in all."""
        self.num_sequences = max(num_sequences, 1)
        for counts in (self.loads, self.entropies, self.losses):
            counts.clear()

    @staticmethod
    def add(counts: dict[int, Tensor], layer: int, value: Tensor) -> None:
        """Add to what was counted in a layer."""
        counts[layer] = counts[layer] + value.detach() if layer in counts else value.detach()


class Router(TopKRouter):
    """softmax over the logits of all experts, the top k, divided by their sum if the model says so; all in float32.

    As `MixtralTopKRouter` and `Qwen3MoeTopKRouter` of transformers, but for the logits, which are float32 here
    whatever the precision of the weights.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: Any,
        is_mtp_layer: bool = False,
        *,
        mixture: Mixture,
        tally: Tally,
    ):
        """megatron-core gives the first three; `is_mtp_layer` in 0.19.2 only, and it is False in our models."""
        super().__init__(config=config, pg_collection=pg_collection)
        assert not is_mtp_layer, "no layers for multi-token prediction are built"
        self.mixture, self.tally = mixture, tally
        self.splits_tokens = self.tp_group.size() > 1 and not config.sequence_parallel
        self.rows: Tensor | None = None
        """[N] the row in the stream of each token of the tensor ranks, -1 for padding; None: nothing is counted."""
        self.num_rows = 0
        """Of the whole stream, which context ranks may share."""

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Communicates over tp and cp only to count for the load-balancing loss. input [N, 1, H], this rank's tokens.

        Returns weights [N, E] float32, 0 for experts that are not chosen, and which are, [N, E] bool.
        """
        weight = self.weight
        if self.splits_tokens:
            # Each tensor rank has the gradient of its own tokens; with sp megatron-core sums it, at the end.
            weight = copy_to_tensor_model_parallel_region(weight, group=self.tp_group)
        logits = F.linear(input.float(), weight.float()).flatten(0, 1)
        scores = logits.softmax(-1)
        best, chosen = scores.topk(self.mixture.top_k, dim=-1)
        if self.mixture.normalises:
            best = best / best.sum(-1, keepdim=True)
        weights = torch.zeros_like(scores).scatter(1, chosen, best)
        is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        if self.rows is not None and self.training and torch.is_grad_enabled():
            weights = self._count(weights, scores, logits, is_chosen, self.rows)
        return weights, is_chosen

    def tell(self, rows: Tensor | None, padding: int) -> None:
        """What to count until it is told otherwise: `rows` [N] of the whole stream, followed by `padding` tokens."""
        if rows is None:
            self.rows = None
            return
        held = held_tokens(len(rows), self.cp_group.size(), self.cp_group.rank()).to(rows.device)
        self.rows, self.num_rows = F.pad(rows[held], (0, padding), value=-1), int(rows.max()) + 1

    def _count(self, weights: Tensor, scores: Tensor, logits: Tensor, is_chosen: Tensor, rows: Tensor) -> Tensor:
        """`weights`, whose backward pass brings the gradient of the load-balancing loss along.

        Of `rows`, this rank's are consecutive.
        """
        mine = rows[self.tp_group.rank() * len(scores) :][: len(scores)]
        tokens, tally = mine >= 0, self.tally
        tally.add(tally.loads, self.layer_number, is_chosen[tokens].sum(0))
        entropy = -(scores * logits.log_softmax(-1))[tokens].sum()
        tally.add(tally.entropies, self.layer_number, entropy)
        if not tally.balance_coef:
            return weights
        loss = self._balance_loss(scores[tokens], is_chosen[tokens], mine[tokens]) / tally.num_sequences
        tally.add(tally.losses, self.layer_number, loss)
        return _WithLoss.apply(weights, tally.balance_coef * loss)

    def _balance_loss(self, scores: Tensor, is_chosen: Tensor, rows: Tensor) -> Tensor:
        """sum over rows of sum_e f_e P_e: DeepSeek-V3 (arXiv:2412.19437), equations 17 to 20, for softmax scores.

        Of each row of n tokens, with k of E experts a token: f_e = E / (k n) * the tokens that chose expert e, and P_e
        is the mean score of e; 1 when all experts are used alike. Rows, not micro-batches, are balanced, so that the
        gradient does not depend on packing. The result is this rank's part; f_e has no gradient.
        """
        counts = scores.new_zeros(self.num_rows, self.mixture.num_experts)
        counts.index_add_(0, rows, is_chosen.to(scores.dtype))
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=self.tp_cp_group)
        choices = counts.sum(1, keepdim=True)  # k n
        share = counts * self.mixture.num_experts / choices
        length = choices / self.mixture.top_k
        return ((share / length)[rows] * scores).sum()


class _WithLoss(torch.autograd.Function):
    """Passes a tensor on; in the backward pass a loss of its own, which nobody adds up, gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, passed: Tensor, loss: Tensor) -> Tensor:
        return passed.view_as(passed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(())


class ExpertLayer(MoELayer):
    """megatron-core's layer, whose `padding_mask` says which row of the packed stream a token belongs to.

    Tensor ranks always share the tokens out, since they do not share the experts: without sequence parallelism, where
    each has them all, the layer splits them and brings its output together again. (megatron-core trains mixtures under
    tensor parallelism with sequence parallelism only.)
    """

    def __init__(self, config: TransformerConfig, submodules: Any, layer_number: int | None = None, **options: Any):
        """As MoELayer's; `options` differ between megatron-core's versions."""
        super().__init__(config, submodules, layer_number, **options)
        # Asked for one thing only: to refuse training where each tensor rank would route all tokens.
        self.attn_tp_group = options["pg_collection"].expt_tp

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Communicates over ep, and over tp without sp. hidden_states [N, 1, H] ([N/tp, 1, H] with sp); the result
        likewise, and no bias.

        `padding_mask` [1, N] int64: the row of each token of the whole stream, -1 for padding; None: nothing counts.
        megatron-core hands this argument down to every layer, also when it computes one again in the backward pass,
        which makes it the one safe way to tell the router.
        """
        if self.config.recompute_granularity == "selective" and self.training and torch.is_grad_enabled():
            return checkpoint(self._forward, False, hidden_states, padding_mask), None
        return self._forward(hidden_states, padding_mask), None

    def _forward(self, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        num_tokens, padding = len(hidden_states), 0
        if self.router.splits_tokens:
            padding = -num_tokens % self.tp_group.size()
            padded = F.pad(hidden_states, (0, 0, 0, 0, 0, padding))
            hidden_states = scatter_to_sequence_parallel_region(padded, group=self.tp_group)
        self.router.tell(None if padding_mask is None else padding_mask[0], padding)
        output, _ = super().forward(hidden_states)
        self.router.tell(None, 0)
        if self.router.splits_tokens:
            output = gather_from_sequence_parallel_region(
                output, tensor_parallel_output_grad=False, group=self.tp_group
            )[:num_tokens]
        return output


def expert_layer(mixture: Mixture, tally: Tally, groups: Groups) -> Any:
    """What stands in a layer's spec in place of its `mlp`, in the form that the installed megatron-core wants."""
    found = get_gpt_layer_local_spec(num_experts=mixture.num_experts, normalization="RMSNorm").submodules.mlp
    router = partial(Router, mixture=mixture, tally=tally)
    if isinstance(found, ModuleSpec):  # 0.16.1
        submodules = MoESubmodules(experts=found.submodules.experts, router=router)
        return ModuleSpec(module=ExpertLayer, submodules=submodules, params={"pg_collection": groups.collection})
    submodules = MoESubmodules(experts=found.keywords["submodules"].experts, router=router)
    return partial(ExpertLayer, submodules=submodules)


def mark_experts(layer: torch.nn.Module) -> None:
    """Have the gradients of a layer's experts summed over the ranks that hold the same experts, whatever ep is.

    megatron-core does it by itself only where ep is above 1; but tensor ranks hold whole experts here and see other
    tokens each.
    """
    for parameter in layer.mlp.experts.parameters():
        parameter.allreduce = False


def rows_of_tokens(cu_seqlens: Tensor, num_rows: int) -> Tensor:
    """[1, N]: the row of each token of a packed stream, -1 in rows from number `num_rows` on, which are padding."""
    lengths = cu_seqlens.diff()
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths.cpu().long())
    return torch.where(rows < num_rows, rows, -1)[None]
