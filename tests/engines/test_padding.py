"""Padding a rank's tokens to a multiple changes nothing: it is zeros in every layer, and is removed afterwards.

Emulated linears need no padding, so that they tell what it does. Scales of a tensor, of blocks along tokens (in weight
gradients) and of biased values are what padding that is not zero would change.
"""

from dataclasses import replace

import pytest
import torch

from megarlhf.config.layout import Layout
from megarlhf.config.precision import FP8
from megarlhf.config.settings import Optimizer
from tests.distributed.pool import run_on_ranks
from tests.engines.layouts import assemble, frozen_batch, tensors_by_name
from tests.tiny import write_llama

MULTIPLE = 128


def build(world_size: int, folder: str, layout: Layout, fp8: FP8, multiple: int):
    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.models.precision.linears import Linears
    from megarlhf.parallel.groups import build_groups
    from megarlhf.weights.load import load_weights

    linears, groups = Linears("emulated_fp8", fp8), build_groups(layout, world_size)
    architecture = Architecture.from_folder(folder)
    model = build_model(architecture, groups, head="vocabulary", dtype=torch.float32, seed=None, linears=linears)
    load_weights(model, folder)
    return replace(model, token_multiple=multiple)


def scored_and_trained(rank: int, world_size: int, folder: str, layout: Layout, fp8: FP8, multiple: int):
    """log-probs of the frozen batch, and this rank's pieces of the gradient of a PPO update on it."""
    from megarlhf.engines.learner import Learner
    from megarlhf.engines.pipeline import micro_batches
    from megarlhf.engines.scorer import LogprobScorer
    from tests.engines.test_learner import ppo_part

    model = build(world_size, folder, layout, fp8, multiple)
    batch = frozen_batch()
    tokens = {one.packed.input_ids.shape[1] for one in micro_batches(batch, model, 4096)}
    assert all(number % multiple == 0 for number in tokens), tokens
    logp = LogprobScorer(model, "logp_reference", 1.0, 4096).annotate(batch).logp_reference
    learner = Learner(model, Optimizer(), total_updates=1, max_tokens=4096)
    learner.accumulate([ppo_part(batch, "vocabulary")], complete_gradients=True)
    return logp, tensors_by_name(model, lambda parameter: parameter.main_grad)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With biases of query, key and value, which make padding other than zero where attention does not stop it."""
    return str(write_llama(tmp_path_factory.mktemp("padding") / "qwen2", family="qwen2"))


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_scores_and_gradients_are_those_without_padding(recipe, folder):
    found = [run_on_ranks(1, scored_and_trained, folder, Layout(), FP8(recipe), n)[0] for n in (1, MULTIPLE)]
    (logp, gradient), (padded_logp, padded_gradient) = found
    torch.testing.assert_close(padded_logp, logp, rtol=0, atol=1e-5)
    torch.testing.assert_close(assemble([padded_gradient]), assemble([gradient]), rtol=1e-4, atol=1e-5)


def test_ranks_that_share_a_stream_pad_it_together(folder):
    layout, fp8 = Layout(tp=2, sp=True), FP8("blockwise")
    plain, padded = (run_on_ranks(2, scored_and_trained, folder, layout, fp8, n) for n in (1, MULTIPLE))
    torch.testing.assert_close(padded[0][0], plain[0][0], rtol=0, atol=1e-5)
    gradients = [assemble([pieces for _, pieces in ranks]) for ranks in (plain, padded)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


def sampled(rank: int, world_size: int, folder: str, fp8: FP8, multiple: int):
    from megarlhf.engines.generator import Generator, Request, Sampling

    model = build(world_size, folder, Layout(), fp8, multiple)
    sampling = Sampling(max_new_tokens=6, temperature=1.0, stop_ids=(), seed=0, step=0)
    requests = [Request(tuple(range(5, 6 + row)), row, 0) for row in range(3)]
    completions = Generator(model, max_slots=2).generate(requests, sampling)
    return [one.token_ids for one in completions], torch.tensor([one.logps for one in completions])


def test_sampling_is_that_without_padding(folder):
    plain, padded = (run_on_ranks(1, sampled, folder, FP8("tensorwise"), n)[0] for n in (1, MULTIPLE))
    assert padded[0] == plain[0]
    torch.testing.assert_close(padded[1], plain[1], rtol=0, atol=1e-5)
