"""Models with layers te beside models whose layers emulate the same recipe, or compute without FP8: one result.

So fused norms, names of weights, padding, precision of each layer, kept weights and adapters are what they should be,
in scoring, training and sampling, on one rank and on two.
"""

from dataclasses import replace

import pytest
import torch

from megarlhf.config.layout import Layout
from megarlhf.config.lora import LoRA
from megarlhf.config.precision import FP8
from megarlhf.config.settings import Optimizer
from megarlhf.models.precision.linears import Linears
from tests.distributed.pool import run_on_ranks
from tests.engines.layouts import assemble, frozen_batch, tensors_by_name
from tests.engines.test_fp8 import PATHS, left_stale, sampled_stale
from tests.loop.planner.measured import planned
from tests.tiny import write_llama
from tests.transformer_engine_cpu.stand_in import BLACKWELL, HOPPER, pretend

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
"""On a rank of two, every dimension of a product is a multiple of 16."""
FAMILIES = {"llama": {}, "gemma3_text": {}, "olmo2": {}, "qwen2": {}}
RECIPES = {"off": FP8(), "blockwise": FP8("blockwise"), "tensorwise": FP8("tensorwise", "hybrid")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("te")
    found = {family: str(write_llama(root / family, family=family, **SIZES)) for family in FAMILIES}
    return found | {"other": str(write_llama(root / "other", seed=1, **SIZES))}


def build(world_size: int, folder: str, linears: Linears, layout: Layout, dtype: torch.dtype, lora: LoRA, recompute):
    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.models.lora import adapter_parameters, add_lora
    from megarlhf.parallel.groups import build_groups
    from megarlhf.weights.load import load_weights

    architecture, groups = Architecture.from_folder(folder), build_groups(layout, world_size)
    model = build_model(
        architecture, groups, head="vocabulary", dtype=dtype, seed=None, recompute=recompute, linears=linears
    )
    load_weights(model, folder)
    for key, parameter in model.named_parameters().items():
        if key[1].endswith("bias"):  # TE's FP8 products add bfloat16 biases, whatever the model's precision
            parameter.data.copy_(parameter.data.bfloat16())
    if lora.rank:
        add_lora(model, lora)
        for key, parameter in adapter_parameters(model).items():
            if key[1].endswith("adapter.b"):
                parameter.data.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(key[1])))
    return model


def everything(
    rank: int,
    world_size: int,
    folder: str,
    linears: Linears,
    layout: Layout = Layout(),  # noqa: B008
    dtype: torch.dtype = torch.float32,
    lora: LoRA = LoRA(),  # noqa: B008
    recompute: str = "none",
):
    """log-probs, sampled ids (where the layout can sample), and this rank's gradients of a PPO update."""
    from megarlhf.engines.generator import Generator, Request, Sampling
    from megarlhf.engines.learner import Learner
    from megarlhf.engines.scorer import LogprobScorer
    from tests.engines.test_learner import ppo_part

    model = build(world_size, folder, linears, layout, dtype, lora, recompute)
    logp = LogprobScorer(model, "logp_reference", 1.0, 4096).annotate(frozen_batch()).logp_reference
    sampled = []
    if not layout.sp:
        sampling = Sampling(max_new_tokens=5, temperature=1.0, stop_ids=(), seed=0, step=0)
        requests = [Request(tuple(range(5, 6 + row)), row, 0) for row in range(3)]
        sampled = [one.token_ids for one in Generator(model, max_slots=2).generate(requests, sampling)]
    learner = Learner(model, Optimizer(learning_rate=1e-3), total_updates=2, max_tokens=4096)
    learner.accumulate([ppo_part(frozen_batch(), "vocabulary")], complete_gradients=True)
    if lora.rank:
        gradients = [p.main_grad.clone() for p in model.named_parameters().values() if p.requires_grad]
    else:
        gradients = tensors_by_name(model, lambda parameter: parameter.main_grad)
    return logp, sampled, gradients


def emulated(linears: Linears) -> Linears:
    return Linears("emulated_fp8" if linears.fp8.is_on else "local", linears.fp8)


def same(found, expected, *, rtol: float = 1e-3, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found[0][0], expected[0][0], rtol=0, atol=1e-5)
    assert found[0][1] == expected[0][1]
    mine, theirs = (assemble([gradients for _, _, gradients in ranks]) for ranks in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_scores_samples_and_learns_as_the_emulation_says(family, recipe, folders):
    linears = Linears("te", RECIPES[recipe])
    same(*(run_on_ranks(1, everything, folders[family], one) for one in (linears, emulated(linears))))


def test_delayed_scaling_does_too(folders):
    delayed = FP8("delayed", "hybrid", amax_history=4)
    same(*(run_on_ranks(1, everything, folders["llama"], Linears(kind, delayed)) for kind in ("te", "emulated_fp8")))


def everything_on_blackwell(rank: int, world_size: int, *arguments):
    pretend(BLACKWELL)
    try:
        return everything(rank, world_size, *arguments)
    finally:
        pretend(HOPPER)


def test_mxfp8_does_too_on_blackwell(folders):
    mxfp8 = FP8("mxfp8")
    found = [
        run_on_ranks(1, everything_on_blackwell, folders["llama"], Linears(kind, mxfp8))
        for kind in ("te", "emulated_fp8")
    ]
    same(*found)


def strangers(rank: int, world_size: int, folder: str) -> list[str]:
    """Modules and optimizers of Transformer Engine in a local model's learner."""
    from megarlhf.engines.learner import Learner

    model = build(1, folder, Linears(), Layout(), torch.float32, LoRA(), "none")
    learner = Learner(model, Optimizer(), total_updates=1, max_tokens=4096)
    parts = [*model.chunks[0].modules(), *(part.optimizer for part in learner.optimizer.chained_optimizers)]
    return [type(part).__name__ for part in parts if "transformer_engine" in type(part).__module__]


def test_a_local_model_has_nothing_of_transformer_engine_where_it_is_installed(folders):
    assert run_on_ranks(1, strangers, folders["gemma3_text"]) == [[]]


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2)], ids=["tp2", "tp2+sp", "pp2"])
@pytest.mark.parametrize("recipe", ["off", "blockwise"])
def test_two_ranks_do_too(recipe, layout, folders):
    linears = Linears("te", RECIPES[recipe])
    same(*(run_on_ranks(2, everything, folders["llama"], one, layout) for one in (linears, emulated(linears))))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_layers_have_the_same_gradients(recompute, folders):
    linears = Linears("te", RECIPES["blockwise"])
    again = (linears, Layout(), torch.float32, LoRA(), recompute)
    same(*(run_on_ranks(1, everything, folders["llama"], *one) for one in (again, (linears,))))


def test_adapters_beside_fp8_linears_read_what_those_read(folders):
    """A fused norm would hand them what is not normed yet."""
    lora, fp8 = LoRA(rank=2), RECIPES["blockwise"]
    te, emulated_too = Linears("te", fp8, takes_adapters=True), Linears("emulated_fp8", fp8)
    found = [
        run_on_ranks(1, everything, folders["llama"], one, Layout(), torch.float32, lora)[0]
        for one in (te, emulated_too)
    ]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-5)
    assert found[0][1] == found[1][1] and len(found[0][2]) == 2 * 4 * 4
    torch.testing.assert_close(found[0][2], found[1][2], rtol=1e-3, atol=1e-6)


def test_without_fp8_a_bfloat16_model_is_the_local_one(folders):
    linears = (Linears("te"), Linears())
    found = [run_on_ranks(1, everything, folders["llama"], one, Layout(), torch.bfloat16)[0] for one in linears]
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_first_and_last_layers_keep_their_precision(folders):
    """All of them kept is no FP8 at all; some is what the emulation says."""
    kept = FP8("blockwise", num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=2)
    same(*(run_on_ranks(1, everything, folders["llama"], one) for one in (Linears("te", kept), Linears("te"))))
    some = Linears("te", FP8("blockwise", num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2))
    same(*(run_on_ranks(1, everything, folders["llama"], one) for one in (some, emulated(some))))


def stale(rank: int, world_size: int, *arguments) -> bool:
    return left_stale(rank, world_size, *arguments, layers="te")


def stale_samples(rank: int, world_size: int, *arguments) -> bool:
    return sampled_stale(rank, world_size, *arguments, layers="te")


@pytest.mark.parametrize("path", PATHS)
def test_no_path_leaves_stale_weights(path, folders):
    assert run_on_ranks(1, stale, path, folders["llama"], folders["other"]) == [False]


def stale_samples_untold(rank: int, world_size: int, *arguments) -> bool:
    from megarlhf.models.build import Model

    told = Model.weights_changed
    Model.weights_changed = lambda model: None
    try:
        return sampled_stale(rank, world_size, *arguments, layers="te")
    finally:
        Model.weights_changed = told


def test_the_generator_samples_with_the_latest_weights(folders):
    """Which nothing but `weights_changed` sees to: megatron-core's schedules tell linears that a step begins, and the
    generator walks the layers without them."""
    assert run_on_ranks(1, stale_samples, folders["llama"], folders["other"]) == [False]
    assert run_on_ranks(1, stale_samples_untold, folders["llama"], folders["other"]) == [True]


def kept_bytes(rank: int, world_size: int, folder: str, tmp: str) -> list[int]:
    """Of quantised weights after scoring with a trained and a frozen model, after training, and once weights left."""
    from pathlib import Path

    from megarlhf.engines.learner import Learner
    from megarlhf.engines.scorer import LogprobScorer
    from megarlhf.loop.housing import house_weights
    from megarlhf.residency.residency import Residency
    from megarlhf.residency.stages import WEIGHTS, Tenant
    from tests.engines.test_learner import ppo_part

    def score(model) -> None:
        LogprobScorer(model, "logp_reference", 1.0, 4096).annotate(frozen_batch())

    def kept(model) -> int:
        spaces = [vars(part).get("_fp8_workspaces", {}) for part in model.chunks[0].modules()]
        both = [way for space in spaces for one in space.values() for way in (one._rowwise_data, one._columnwise_data)]
        return sum(data.nbytes for data in both if data is not None)

    trained, frozen = (
        build(1, folder, Linears("te", RECIPES["blockwise"], is_frozen=frozen), Layout(), torch.float32, LoRA(), "none")
        for frozen in (False, True)
    )
    found = []
    for model in (trained, frozen):
        score(model)
        found.append(kept(model))
    learner = Learner(trained, Optimizer(), total_updates=1, max_tokens=4096)
    learner.accumulate([ppo_part(frozen_batch(), "vocabulary")])
    found.append(kept(trained))
    residency = Residency({Tenant("actor", WEIGHTS): "host"}, Path(tmp))
    house_weights(residency, "actor", trained)
    return [*found, kept(trained)]


def test_what_is_kept_is_what_the_plan_says_and_leaves_with_the_weights(folders, tmp_path):
    """A frozen model keeps nothing."""
    from megarlhf.loop.planner.sizes import copy_bytes
    from megarlhf.parallel.grid import Coordinates

    (kept,) = run_on_ranks(1, kept_bytes, folders["llama"], str(tmp_path))
    model = replace(planned(Layout(), **SIZES), layers="te", fp8=RECIPES["blockwise"])
    scoring, training = (copy_bytes(model, Coordinates(0, 0, 0), trains=trains) for trains in (False, True))
    assert kept == [scoring, 0, training, 0] and training == 2 * scoring > 0
