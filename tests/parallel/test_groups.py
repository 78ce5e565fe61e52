"""megatron-core itself, on the groups of a layout, without parallel_state: every layout trains like one rank."""

import functools

import pytest
import torch
import torch.distributed as dist

from megarlhf.config.layout import Layout
from megarlhf.errors import LayoutError
from tests.distributed.pool import run_on_ranks

NUM_LAYERS, HIDDEN, HEADS, KV_GROUPS, FFN, VOCABULARY, LENGTH, ROWS, STEPS = 4, 32, 4, 2, 48, 64, 12, 4, 3
LAYOUTS = [Layout(tp=2), Layout(pp=2), Layout(tp=2, sp=True), Layout()]


def global_weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The whole weight of a name, the same on every rank and layout."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator) * 0.2 + (1.0 if "norm" in name else 0.0)


def fill(model, groups) -> None:
    """Give every parameter its shard of the global weight (layers by their global number)."""
    first_layer = groups.coordinates.pp * (NUM_LAYERS // groups.layout.pp)
    for name, parameter in model.named_parameters():
        if name == "output_layer.weight":  # the last stage's copy of the tied embedding
            name = "embedding.word_embeddings.weight"
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            parts[at] = str(int(parts[at]) + first_layer)
        shape = list(parameter.shape)
        is_split = parameter.tensor_model_parallel
        axis = parameter.partition_dim if is_split else 0
        if is_split:
            shape[axis] *= groups.layout.tp
        whole = global_weight(".".join(parts), tuple(shape))
        if is_split and parts[-2] == "linear_fc1":  # [gate; up] is cut in each half
            halves = [half.chunk(groups.layout.tp)[groups.coordinates.tp] for half in whole.chunk(2)]
            whole = torch.cat(halves)
        elif is_split:
            whole = whole.chunk(groups.layout.tp, dim=axis)[groups.coordinates.tp]
        parameter.data.copy_(whole)


class Norm(torch.nn.Module):
    """RMS norm that sequence parallelism may use: its gradient is summed over tensor-parallel ranks."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel
        self.weight.tensor_model_parallel = False

    def forward(self, hidden):
        return torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


def build(groups):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    layout = groups.layout
    config = TransformerConfig(
        num_layers=NUM_LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=KV_GROUPS,
        ffn_hidden_size=FFN,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        sequence_parallel=layout.sp,
        pipeline_dtype=torch.float32,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
        variable_seq_lengths=layout.pp > 1,
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, even without experts
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = Norm
    layer.submodules.pre_mlp_layernorm = Norm
    count = NUM_LAYERS // layout.pp
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=Norm),
        VOCABULARY,
        LENGTH,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
        parallel_output=True,
        pg_collection=groups.collection,
    )
    fill(model, groups)
    return config, model


def cross_entropy(logits, targets, groups):
    """Sum over tokens of -log p, from vocabulary-parallel logits [b, s, V/tp]: gathered, to be independent of ours."""
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    whole = gather_from_tensor_model_parallel_region(logits, group=groups.tp)
    return torch.nn.functional.cross_entropy(whole.float().flatten(0, 1), targets.flatten(), reduction="sum")


def forward_step(groups, iterator, model):
    tokens = next(iterator)
    positions = torch.arange(LENGTH)[None].expand(tokens.shape[0], -1)
    output = model(tokens[:, :-1], positions, None)
    denominator = float(ROWS * LENGTH)

    def loss_of(logits):
        loss = cross_entropy(logits, tokens[:, 1:], groups) / denominator
        return loss, torch.tensor(1, dtype=torch.int), {"loss": loss.detach()}

    return output, loss_of


def finalize(model, num_tokens, pg_collection, force_all_reduce=False):
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(model, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)


def train(layout: Layout, world_size: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of three optimizer steps on the same four rows."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from megarlhf.parallel.groups import build_groups

    groups = build_groups(layout, world_size)
    config, model = build(groups)
    collection = groups.collection
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=True), model, pg_collection=collection
    )
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0, use_distributed_optimizer=True, bf16=False)
    optimizer = get_megatron_optimizer(settings, [ddp], pg_collection=collection, use_gloo_process_groups=False)
    config.finalize_model_grads_func = finalize
    run = get_forward_backward_func(pp_size=layout.pp, vp_size=None)
    communicator = {"p2p_communicator": P2PCommunicator(groups.pp, config)} if layout.pp > 1 else {}
    rows = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    mine = rows.chunk(layout.dp(world_size))[groups.coordinates.dp]
    curve = []
    for _ in range(STEPS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run(
            forward_step_func=functools.partial(forward_step, groups),
            data_iterator=iter(mine.split(1)),
            model=[ddp],
            num_microbatches=len(mine),
            seq_length=LENGTH,
            micro_batch_size=1,
            pg_collection=collection,
            **communicator,
        )
        _, norm, _ = optimizer.step()
        loss = sum((item["loss"] for item in losses), torch.tensor(0.0)) / layout.tp
        dist.all_reduce(loss)  # stages that are not the last hold none; tensor ranks hold the same
        curve.append((float(loss), float(norm)))
    return curve


def train_on_rank(rank: int, world_size: int, layout: Layout) -> list[tuple[float, float]]:
    return train(layout, world_size)


@pytest.fixture(scope="module")
def one_rank(single_rank) -> list[tuple[float, float]]:
    return train(Layout(), single_rank[1])


def test_one_rank_learns(one_rank):
    losses = [loss for loss, _ in one_rank]
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_ranks_train_like_one(layout, one_rank):
    for curve in run_on_ranks(2, train_on_rank, layout):
        torch.testing.assert_close(torch.tensor(curve), torch.tensor(one_rank), rtol=1e-5, atol=1e-6)


def sizes_of_groups(rank: int, world_size: int, layout: Layout):
    from megarlhf.parallel.groups import build_groups

    groups = build_groups(layout, world_size)
    state = torch.get_rng_state()
    for axis in ("tp", "pp", "dp", "mp", "embd", "dp_cp", "tp_ep_pp"):
        assert dist.get_process_group_ranks(getattr(groups.collection, axis)) == groups.ranks(axis), axis
    assert torch.equal(state, torch.get_rng_state())
    return groups.coordinates.tp, groups.coordinates.pp, groups.is_first_stage, groups.is_last_stage


def test_two_models_of_one_run_have_their_own_groups():
    assert run_on_ranks(2, sizes_of_groups, Layout(tp=2)) == [(0, 0, True, True), (1, 0, True, True)]
    assert run_on_ranks(2, sizes_of_groups, Layout(pp=2)) == [(0, 0, True, False), (0, 1, False, True)]


def test_experts_that_the_ranks_cannot_share_are_refused(single_rank):
    from megarlhf.parallel.groups import build_groups

    with pytest.raises(LayoutError, match="ep 2 does not divide the 1 ranks of a stage"):
        build_groups(Layout(ep=2), 1)
