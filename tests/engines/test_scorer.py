"""Scores do not depend on the layout, the micro-batch size, batch mates or order; and nothing is left behind."""

import pytest
import torch

from megarlhf.config.layout import Layout
from megarlhf.engines.pipeline import plan_rows
from megarlhf.records.experience import Experience
from megarlhf.records.spans import Spans
from tests.distributed.pool import run_on_ranks
from tests.engines.layouts import frozen_batch
from tests.tiny import write_llama

CASES = {
    "one row a micro-batch": (1, Layout(), 1),
    "dp2": (2, Layout(), 20),
    "tp2": (2, Layout(tp=2), 20),
    "tp2+sp": (2, Layout(tp=2, sp=True), 20),
    "pp2": (2, Layout(pp=2), 20),
    "pp2 dp2": (4, Layout(pp=2), 8),
}


def build(world_size: int, layout: Layout, folder: str, head: str):
    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.parallel.groups import build_groups
    from megarlhf.weights.load import load_weights

    groups = build_groups(layout, world_size)
    model = build_model(Architecture.from_folder(folder), groups, head=head, dtype=torch.float32)
    load_weights(model, folder)
    return model


def score(rank: int, world_size: int, layout: Layout, max_tokens: int, actor: str, critic: str, batch: Experience):
    """Log-probs, entropies, values and sequence scores of `batch`, as every rank sees them."""
    from megarlhf.engines.scorer import LogprobScorer, RewardModelScorer, ValueScorer

    policy, judge = build(world_size, layout, actor, "vocabulary"), build(world_size, layout, critic, "value")
    policy.chunks[0].train()
    scored = LogprobScorer(policy, "logp_start", 0.7, max_tokens).annotate(batch)
    scored = ValueScorer(judge, max_tokens).annotate(scored)
    assert policy.chunks[0].training, "the mode of the model was not restored"
    return scored.logp_start, scored.entropy, scored.value, RewardModelScorer(judge, max_tokens).scores(batch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("scorer")
    return str(write_llama(root / "actor", tied=True)), str(write_llama(root / "critic", num_labels=1))


@pytest.fixture(scope="module")
def batch():
    return frozen_batch(num_rows=5, seed=11)


@pytest.fixture(scope="module")
def expected(folders, batch):
    return run_on_ranks(1, score, Layout(), 4096, *folders, batch)[0]


@pytest.mark.parametrize("case", CASES)
def test_scores_do_not_depend_on_layout_or_micro_batch(case, folders, batch, expected):
    world_size, layout, max_tokens = CASES[case]
    for found in run_on_ranks(world_size, score, layout, max_tokens, *folders, batch):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_scores_equal_transformers(folders, batch, expected):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    policy = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
    judge = AutoModelForSequenceClassification.from_pretrained(folders[1], dtype=torch.float32).eval()
    for row in range(batch.num_rows):
        length, start = int(batch.lengths[row]), int(batch.prompt_lengths[row])
        ids = batch.tokens[row, :length][None]
        with torch.no_grad():
            logp = (policy(ids).logits[0] / 0.7).log_softmax(-1)
            scores = judge.score(judge.model(ids).last_hidden_state)[0, :, 0]
        at = torch.arange(start - 1, length - 1)
        torch.testing.assert_close(expected[0][row, at], logp[at, ids[0, at + 1]], rtol=0, atol=1e-5)
        torch.testing.assert_close(expected[1][row, at], -(logp.exp() * logp).sum(-1)[at], rtol=0, atol=1e-5)
        torch.testing.assert_close(expected[2][row, at], scores[at], rtol=0, atol=1e-5)
        torch.testing.assert_close(expected[3][row], scores[length - 1], rtol=0, atol=1e-5)


def test_results_come_back_in_input_order_whatever_the_order(folders, batch, expected):
    shuffled = [3, 0, 4, 2, 1]
    found = run_on_ranks(2, score, Layout(), 9, *folders, batch.select(shuffled))[1]
    torch.testing.assert_close(found[0], expected[0][shuffled], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[3], expected[3][shuffled], rtol=0, atol=1e-5)


def test_padding_side_and_amount_do_not_exist(folders, batch, expected):
    tokens = torch.nn.functional.pad(batch.tokens, (0, 9), value=7)
    wider = Experience(
        tokens=tokens,
        lengths=batch.lengths,
        prompt_lengths=batch.prompt_lengths,
        mask=torch.nn.functional.pad(batch.mask, (0, 9)),
        row_id=batch.row_id,
        group=batch.group,
        finished=batch.finished,
    )
    found = run_on_ranks(1, score, Layout(), 4096, *folders, wider)[0]
    assert torch.equal(found[0][:, : expected[0].shape[1]], expected[0])
    assert torch.equal(found[3], expected[3])


def test_every_rank_runs_as_many_micro_batches_as_the_busiest():
    plan = plan_rows(Spans.unshared([95] * 5 + [20] * 5), dp=2, max_tokens=100)
    assert len(plan[0]) == len(plan[1])
    assert sorted(row for rank in plan for rows in rank for row in rows) == list(range(10))
    assert [len(rank) for rank in plan_rows(Spans.unshared([7]), dp=3, max_tokens=100)] == [1, 1, 1]
