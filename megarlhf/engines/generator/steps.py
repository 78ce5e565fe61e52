"""What one layer does to a stream of tokens, apart from attention itself: by its own modules, or with repacked weights.

The modules serve every backend. On a CPU, megatron-core's linear layers multiply by row-major weights, and with the few
rows of a decoding step most of the time goes into reading them badly; oneDNN's own blocked order is 1.2 to 2 times as
fast (SmolLM2-135M, float32, 1 thread, 32 rows: 1.3 times for the layers, 1.8 times for the vocabulary head). So a
generation on a CPU makes a blocked copy of the weights first, when it is long enough to pay.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP

from megarlhf.device import labelled
from megarlhf.models.architecture import Architecture
from megarlhf.models.attention import Scoring, SelfAttention
from megarlhf.models.build import Model
from megarlhf.models.lora import adapters
from megarlhf.models.moe import ExpertLayer
from megarlhf.models.norm import RMSNorm
from megarlhf.models.pointwise import gated
from megarlhf.models.precision.emulated import states
from megarlhf.models.precision.te import layer_precision

Map = Callable[[torch.Tensor], torch.Tensor]
Expert = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(hidden states [M, H], what each is multiplied by [M] or None) -> [M, H]."""

_WORTH_PACKING = 8
"""New tokens per response; packing costs about as much as one decoding step."""


@dataclass(frozen=True)
class Steps:
    """The steps of one layer on hidden states [N, 1, H]; those that sum over tensor ranks communicate."""

    input_norm: Map
    heads: Map
    """[N, kv_groups/tp, heads of a group + 2, D]: each group's queries, its key and its value, before rotary embedding;
    the caller may write to it."""
    project: Map
    """Attention's output [N, 1, heads/tp * D] -> [N, 1, H], summed over tensor ranks."""
    mlp_norm: Map
    mlp: Map
    """Summed over tensor ranks."""
    scoring: Scoring
    rope_place: int
    """Which of the architecture's ropes turns the layer's heads."""
    precision: Callable[[], AbstractContextManager[None]] = nullcontext
    """What the layer computes in."""


@labelled("sample")
def layer_steps(model: Model, num_new_tokens: int) -> list[Steps]:
    """Steps of this stage's layers; with repacked weights where that is possible and pays.

    A model with LoRA's adapters runs by its modules: repacked weights would leave the adapters out.
    """
    (chunk,), architecture = model.chunks, model.architecture
    pack = num_new_tokens >= _WORTH_PACKING and can_pack(model) and not adapters(model)
    return [
        _packed_steps(layer, architecture, model.groups.tp)
        if pack and _is_plain(layer)
        else _module_steps(layer, architecture)
        for layer in chunk.decoder.layers
    ]


@labelled("sample")
def head_map(model: Model, num_new_tokens: int) -> Map:
    """Hidden states [N, H] -> this rank's logits [N, V/tp]; on the last stage."""
    weight = model.output_weight()
    if num_new_tokens >= _WORTH_PACKING and can_pack(model):
        return _packed(weight)
    return lambda hidden: F.linear(hidden, weight)


def packed_bytes(model: Model, num_new_tokens: int) -> int:
    """Memory of this stage's repacked weights while so many tokens are sampled; 0 where none are made."""
    if num_new_tokens < _WORTH_PACKING or not can_pack(model):
        return 0
    (chunk,) = model.chunks
    layers = [layer for layer in chunk.decoder.layers if _is_plain(layer) and not adapters(model)]
    weights = [weight for layer in layers for weight in _linear_weights(layer)]
    weights += [model.output_weight()] if model.groups.is_last_stage else []
    return sum(weight.nbytes for weight in weights)


def _linear_weights(layer: torch.nn.Module) -> list[torch.Tensor]:
    attention = layer.self_attention
    linears = [attention.linear_qkv, attention.linear_proj]
    linears += [linear for mlp in _mlps(layer) for linear in (mlp.linear_fc1, mlp.linear_fc2)]
    return [linear.weight for linear in linears]


def _mlps(layer: torch.nn.Module) -> list[torch.nn.Module]:
    """The feed-forward part of a layer, or those of this rank's experts."""
    return list(layer.mlp.experts.local_experts) if layer.is_moe_layer else [layer.mlp]


def can_pack(model: Model) -> bool:
    """oneDNN works here on the model's weights."""
    if next(model.chunks[0].parameters()).device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return model.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _module_steps(layer: torch.nn.Module, architecture: Architecture) -> Steps:
    attention = layer.self_attention
    return Steps(
        input_norm=layer.input_layernorm,
        heads=_heads(attention, lambda hidden: attention.linear_qkv(hidden)[0]),
        project=lambda context: _with_bias(attention.linear_proj(context)),
        mlp_norm=layer.pre_mlp_layernorm,
        mlp=_module_experts(layer.mlp) if layer.is_moe_layer else lambda hidden: _with_bias(layer.mlp(hidden)),
        scoring=attention.core_attention.scoring,
        rope_place=architecture.rope_place(layer.layer_number - 1),
        precision=partial(layer_precision, layer.config, layer.layer_number),
    )


def _heads(attention: SelfAttention, linear: Map) -> Map:
    """`Steps.heads` of what `linear` gives, in which a group's rows are next to each other already."""
    config, size = attention.config, attention.hidden_size_per_attention_head
    ranks, groups = attention.pg_collection.tp.size(), config.num_query_groups
    if ranks <= groups and not config.qk_layernorm:
        rows = config.num_attention_heads // groups + 2
        return lambda hidden: linear(hidden).view(len(hidden), -1, rows, size)

    def heads(hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (part[:, 0] for part in attention.split(linear(hidden)))
        return torch.cat([query.unflatten(1, (key.shape[1], -1)), key[:, :, None], value[:, :, None]], 2)

    return heads


def _module_experts(mlp: ExpertLayer) -> Map:
    return _experts(
        mlp, [lambda x, weight, expert=expert: expert(x, weight)[0] for expert in mlp.experts.local_experts]
    )


def _experts(mlp: ExpertLayer, experts: Sequence[Expert]) -> Map:
    """A layer of experts, of which `experts` are this rank's. The ranks of an ep group hold the same tokens here, so
    each adds up what its experts say, and nothing has to be dispatched."""
    first = mlp.local_expert_indices[0]

    def mixture(hidden: torch.Tensor) -> torch.Tensor:
        weights, is_chosen = mlp.router(hidden)
        tokens, total = hidden[:, 0], torch.zeros_like(hidden[:, 0])
        for place, expert in enumerate(experts, start=first):
            chosen = is_chosen[:, place].nonzero()[:, 0]
            if len(chosen):
                total.index_add_(0, chosen, expert(tokens[chosen], weights[chosen, place]))
        return _summed(total, mlp.ep_group)[:, None]

    return mixture


def _with_bias(output: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
    result, bias = output
    return result if bias is None else result + bias


def _is_plain(layer: torch.nn.Module) -> bool:
    """The layer is made of megatron-core's local modules, its feed-forward is gated; only `linear_qkv` has a bias, and
    no product is emulated."""
    attention, mlps = layer.self_attention, _mlps(layer)
    return (
        type(attention.linear_qkv) is ColumnParallelLinear
        and type(attention.linear_proj) is RowParallelLinear
        and all(type(mlp) is MLP and type(mlp.linear_fc1) is ColumnParallelLinear for mlp in mlps)
        and all(type(mlp.linear_fc2) is RowParallelLinear for mlp in mlps)
        and layer.config.gated_linear_unit
        and not layer.config.add_bias_linear
        and not any(states(layer))
    )


def _packed_steps(layer: torch.nn.Module, architecture: Architecture, group: dist.ProcessGroup) -> Steps:
    attention = layer.self_attention
    qkv = _packed(attention.linear_qkv.weight, attention.linear_qkv.bias)
    projection = _packed(attention.linear_proj.weight)
    norm_attention, norm_mlp = _post_norms(layer) if architecture.post_norms else (_same, _same)
    if layer.is_moe_layer:
        mlp = _experts(layer.mlp, [_packed_gated(expert) for expert in _mlps(layer)])
    else:
        feed_forward = _packed_gated(layer.mlp)

        def mlp(hidden: torch.Tensor) -> torch.Tensor:
            return norm_mlp(_summed(feed_forward(hidden, None), group))

    return Steps(
        input_norm=_lean_norm(layer.input_layernorm),
        heads=_heads(attention, qkv),
        project=lambda context: norm_attention(_summed(projection(context), group)),
        mlp_norm=_lean_norm(layer.pre_mlp_layernorm),
        mlp=mlp,
        scoring=attention.core_attention.scoring,
        rope_place=architecture.rope_place(layer.layer_number - 1),
    )


def _packed_gated(mlp: MLP) -> Expert:
    """This rank's part of a gated feed-forward."""
    gate_and_up, down = _packed(mlp.linear_fc1.weight), _packed(mlp.linear_fc2.weight)
    activation = mlp.config.activation_func

    def expert(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        inner = gated(gate_and_up(x), activation)
        return down(inner if weight is None else (inner * weight[:, None]).to(x.dtype))

    return expert


def _post_norms(layer: torch.nn.Module) -> tuple[Map, Map]:
    """The norms of what attention and feed-forward give."""
    linears = layer.self_attention.linear_proj, layer.mlp.linear_fc2
    attention, mlp = (_lean_norm(linear.post_layernorm) for linear in linears)
    return attention, mlp


def _lean_norm(norm: torch.nn.Module) -> Map:
    """`models.norm.RMSNorm` of a few rows in fewer operations than torch's, inside in float32 as there; others as they
    are."""
    if type(norm) is not RMSNorm:
        return norm
    weight, (size,) = norm.weight.detach().float(), norm.normalized_shape
    weight, eps = 1 + weight if norm.is_zero_centered else weight, torch.tensor(norm.eps)

    def normed(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        factor = torch.addcmul(eps, length, length, value=1 / size).rsqrt_()
        out = wide * factor if wide is x else wide.mul_(factor)
        return torch.mul(out, weight, out=out if wide is x else torch.empty_like(x))

    return normed


def _same(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


def _packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Map:
    """x -> x @ weight.T + bias with a blocked copy of `weight`, made now."""
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 32)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, blocked, bias, "none", [], "")


def _summed(partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over tensor ranks, in place. Collective over `group`."""
    if group.size() > 1:
        dist.all_reduce(partial, group=group)
    return partial
