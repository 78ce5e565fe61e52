"""Models that compute in emulated FP8: no path leaves stale weights, layouts agree as far as their scales allow."""

import pytest
import torch

from megarlhf.config.layout import Layout
from megarlhf.config.precision import FP8
from megarlhf.config.settings import Optimizer
from tests.distributed.pool import run_on_ranks
from tests.engines.layouts import frozen_batch
from tests.tiny import write_llama

BLOCKWISE = FP8("blockwise")
PATHS = ("update", "load", "reshard", "reference in", "reference out")


def build(
    folder: str,
    fp8: FP8 = BLOCKWISE,
    layout: Layout | None = None,
    world_size: int = 1,
    layers: str = "emulated_fp8",
):
    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.models.precision.linears import Linears
    from megarlhf.parallel.groups import build_groups
    from megarlhf.weights.load import load_weights

    groups = build_groups(layout or Layout(), world_size)
    linears = Linears(layers, fp8)
    model = build_model(
        Architecture.from_folder(folder), groups, head="vocabulary", dtype=torch.float32, seed=None, linears=linears
    )
    load_weights(model, folder)
    return model


def logps(model) -> torch.Tensor:
    """log-probs of the frozen batch, [B, T]; fills what the linears keep."""
    from megarlhf.engines.scorer import LogprobScorer

    return LogprobScorer(model, "logp_reference", 1.0, 4096).annotate(frozen_batch()).logp_reference


def left_stale(rank: int, world_size: int, path: str, folder: str, other: str, layers: str = "emulated_fp8") -> bool:
    """Whether, once weights changed along `path`, a model computes with what it kept of those before."""
    from megarlhf.engines.learner import Learner
    from megarlhf.engines.scorer import LogprobScorer, ReferenceScorer
    from megarlhf.residency.snapshot import Snapshot
    from megarlhf.weights.exchange import Resharder
    from megarlhf.weights.load import load_weights
    from tests.engines.test_learner import ppo_part

    model = build(folder, layers=layers)
    learner = Learner(model, Optimizer(learning_rate=0.1), total_updates=1, max_tokens=4096)
    before = logps(model)
    if path == "update":
        assert learner.update([ppo_part(frozen_batch(), "vocabulary")]).applied
    if path == "load":
        load_weights(model, other)
    if path == "reshard":
        Resharder(build(other, layers=layers), model).run()
    if path.startswith("reference"):
        snapshot = Snapshot(build(other, layers=layers).named_parameters())
        scorer = ReferenceScorer(snapshot, LogprobScorer(model, "logp_reference", 1.0, 4096))
        seen = scorer.annotate(frozen_batch()).logp_reference
        if path == "reference in":
            return not torch.equal(seen, logps(build(other, layers=layers)))
        return not torch.equal(logps(model), before)
    return not torch.equal(logps(model), logps(copy_of(model, build(folder, layers=layers))))


def copy_of(model, fresh):
    """`fresh`, which has kept nothing, with the weights of `model`."""
    with torch.no_grad():
        for key, parameter in fresh.named_parameters().items():
            parameter.copy_(model.named_parameters()[key])
    return fresh


def left_stale_when_nothing_is_told(rank: int, world_size: int, path: str, folder: str, other: str) -> bool:
    """The same where linears are not told that weights changed."""
    from megarlhf.models.build import Model

    told = Model.weights_changed
    Model.weights_changed = lambda model: None
    try:
        return left_stale(rank, world_size, path, folder, other)
    finally:
        Model.weights_changed = told


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("fp8")
    return [str(write_llama(root / name, seed=seed)) for seed, name in enumerate(("one", "other"))]


@pytest.mark.parametrize("path", PATHS)
def test_no_path_leaves_stale_weights(path, folders):
    assert run_on_ranks(1, left_stale, path, *folders) == [False]


@pytest.mark.parametrize("path", ["update", "load", "reshard", "reference in"])
def test_a_path_that_tells_nothing_is_found_out(path, folders):
    assert run_on_ranks(1, left_stale_when_nothing_is_told, path, *folders) == [True]


def sampled_stale(rank: int, world_size: int, folder: str, other: str, layers: str = "emulated_fp8") -> bool:
    """Whether the generator samples with what it kept of the weights before a reshard."""
    from megarlhf.engines.generator import Generator, Request, Sampling
    from megarlhf.weights.exchange import Resharder

    def sample(model):
        sampling = Sampling(max_new_tokens=12, temperature=1.0, stop_ids=(), seed=0, step=0)
        return Generator(model, max_slots=4).generate([Request((5, 6, 7), row, 0) for row in range(4)], sampling)

    model = build(folder, layers=layers)
    sample(model)
    Resharder(build(other, layers=layers), model).run()
    return [one.logps for one in sample(model)] != [one.logps for one in sample(build(other, layers=layers))]


def test_the_generator_samples_in_fp8_with_the_latest_weights(folders):
    assert run_on_ranks(1, sampled_stale, *folders) == [False]


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


def logps_under(rank: int, world_size: int, folder: str, fp8: FP8, layout: Layout) -> torch.Tensor:
    return logps(build(folder, fp8, layout, world_size))


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, sp=True)], ids=["tp2", "tp2+sp"])
def test_blocks_are_the_same_under_tensor_parallelism_where_tensors_are_not(layout, tmp_path):
    """Shards are multiples of 128: a block's scale does not depend on the cut, a tensor's does. Mean of 5 seeds."""
    moved = {"blockwise": 0.0, "tensorwise": 0.0}
    for seed in range(5):
        folder = str(write_llama(tmp_path / str(seed), seed=seed, **WIDE))
        for recipe in moved:
            alone = run_on_ranks(1, logps_under, folder, FP8(recipe), Layout())[0]
            cut = run_on_ranks(2, logps_under, folder, FP8(recipe), layout)[0]
            mask = frozen_batch().mask
            moved[recipe] += float((alone - cut)[mask].abs().mean()) / 5
    assert 0 < moved["blockwise"] < 0.5 * moved["tensorwise"]


def num_emulated(rank: int, world_size: int, folder: str, fp8: FP8) -> list[int]:
    from megarlhf.models.precision.emulated import states

    return [len(list(states(layer))) for layer in build(folder, fp8).chunks[0].decoder.layers]


def test_first_and_last_layers_keep_their_precision(folders):
    fp8 = FP8("blockwise", num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2)
    assert run_on_ranks(1, num_emulated, folders[0], fp8) == [[0, 4, 0, 0]]


def delayed_scales(rank: int, world_size: int, folder: str) -> list[float]:
    from megarlhf.engines.learner import Learner
    from megarlhf.models.precision.emulated import states
    from tests.engines.test_learner import ppo_part

    model = build(folder, FP8("delayed"), Layout(), world_size)
    learner = Learner(model, Optimizer(), total_updates=2, max_tokens=16)
    learner.update([ppo_part(frozen_batch(), "vocabulary")])
    found = [state.histories for state in states(model.chunks[0])]
    return [history.scale for one in found for history in (one.input, one.weight)]


def test_delayed_scales_are_the_same_on_all_ranks(folders):
    """Ranks see other rows, and one may see fewer micro-batches: the histories are reduced once a step."""
    one, other = run_on_ranks(2, delayed_scales, folders[0])
    assert one == other and all(scale > 1 for scale in one)
