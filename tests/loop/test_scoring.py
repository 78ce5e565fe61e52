"""Scores of a batch: several sources mixed and logged one by one; and what becomes of responses without a score."""

import logging
import time

import pytest
import torch

from megarlhf.algorithms.groups import group_relative
from megarlhf.config.settings import Reward
from megarlhf.errors import RewardError
from megarlhf.loop.scoring import Scores, reward_scores
from megarlhf.records.experience import Experience
from megarlhf.records.metrics import merge_metrics, metric_results
from megarlhf.rewards.sources import FunctionSource
from tests.distributed.pool import run_on_ranks

RESPONSES = ["one", "one two", "", "one two three", "bad"]


def batch(responses=RESPONSES) -> Experience:
    count = len(responses)
    return Experience.from_completions(
        [[5, 6]] * count,
        [[7] * (i + 1) for i in range(count)],
        None,
        row_id=range(count),
        group=range(count),
        finished=[True] * count,
        prompts=["p"] * count,
        responses=responses,
        metadata=[{"id": f"row{i}"} for i in range(count)],
    )


def letters(prompts, responses, metadata):
    return [len(response) for response in responses]


def picky(prompts, responses, metadata):
    """Cannot score "bad"."""
    return [1 / (response != "bad") for response in responses]


def asleep(prompts, responses, metadata):
    if "bad" in responses:
        time.sleep(1)
    return [2.0] * len(responses)


def source(function, timeout_s=5.0, retries=0) -> FunctionSource:
    return FunctionSource(function.__name__, function, timeout_s, retries)


def annotate(sources, weights, on_failure="stop", timeout_s=5.0, experience=None):
    reported: list = []
    scores = Scores(None, sources, weights, timeout_s, on_failure, reported.append)
    filled = scores.annotate(batch() if experience is None else experience)
    return filled, metric_results(merge_metrics(reported))


def annotate_on_rank(rank, world_size, on_failure, count):
    try:
        filled, metrics = annotate([source(picky)], [1.0], on_failure, experience=batch(RESPONSES[:count]))
    except RewardError as error:
        return str(error)
    return filled.score, filled.mask, metrics


def test_sources_are_weighted_and_logged_by_their_own_numbers(single_rank):
    reported: list = []
    settings = Reward(functions=("length", "max_words(1)", f"{__name__}:letters"), weights=(2.0, 0.5, -1.0))
    filled = reward_scores(settings, None, "", reported.append).annotate(batch())
    words, few, characters = [1, 2, 0, 3, 1], [1, 0, 1, 0, 1], [3, 7, 0, 13, 3]
    assert filled.score.tolist() == [2 * w + 0.5 * f - c for w, f, c in zip(words, few, characters, strict=True)]
    found = metric_results(merge_metrics(reported))
    assert found == pytest.approx({"reward/length": 1.4, "reward/max_words": 0.6, "reward/letters": 5.2})
    assert torch.equal(filled.mask, batch().mask)


def test_without_weights_every_source_counts_once(single_rank):
    scores = reward_scores(Reward(functions=("length", "length")), None, "", lambda metrics: None)
    assert scores.annotate(batch()).score.tolist() == [2, 4, 0, 6, 2]
    assert [part.name for part in scores.sources] == ["length", "length_2"]


def test_scores_of_low_precision_are_float32_before_they_are_mixed(single_rank):
    half = [torch.bfloat16, torch.float16]
    sources = [source(lambda p, r, m, dtype=dtype: torch.full((len(r),), 0.1, dtype=dtype)) for dtype in half]
    score = annotate(sources[:1], [1.0])[0].score
    assert score.dtype == torch.float32 and score.tolist() == [float(torch.tensor(0.1, dtype=torch.bfloat16))] * 5
    scaled = annotate(sources[1:], [70000.0])[0].score
    assert scaled.tolist() == pytest.approx([float(torch.tensor(0.1, dtype=torch.float16)) * 70000] * 5)


def test_group_statistics_of_low_precision_scores_are_those_of_float32(single_rank):
    def group(values, dtype):
        rows = batch(["r"] * 4)
        scored = annotate([source(lambda p, r, m: torch.tensor(values, dtype=dtype))], [1.0], experience=rows)[0]
        one = torch.zeros(4, dtype=torch.int64)
        return group_relative(scored.score, one, scored.mask.any(1), "unbiased").tolist()

    near = group([1, 1, 1, 1.0078125], torch.bfloat16)
    assert near == pytest.approx([-0.49987, -0.49987, -0.49987, 1.49962], abs=1e-5)
    assert group([0.1] * 4, torch.float16) == [0.0] * 4
    assert group([1, 0, 1, 0], torch.int64) == pytest.approx([0.866, -0.866, 0.866, -0.866], abs=1e-3)


def test_a_response_without_a_score_changes_nothing_for_its_siblings(single_rank):
    filled = annotate([source(picky), source(letters)], [0.0, 1.0], "mask")[0]
    one = torch.zeros(5, dtype=torch.int64)
    found = group_relative(filled.score, one, filled.mask.any(1), "biased")
    alone = group_relative(filled.score[:4], one[:4], filled.mask[:4].any(1), "biased")
    assert torch.equal(found[:4], alone) and found[4] == 0


def test_stop_ends_the_run_with_the_traceback_and_the_samples(single_rank):
    with pytest.raises(RewardError, match="ZeroDivisionError (.|\n)*row0"):
        annotate([source(picky)], [1.0])


def test_mask_leaves_only_the_failing_response_out_of_the_training(single_rank, caplog):
    with caplog.at_level(logging.WARNING):
        filled, metrics = annotate([source(letters), source(picky)], [1.0, 10.0], "mask")
    assert filled.mask.any(1).tolist() == [True, True, True, True, False]
    assert filled.score.tolist() == [13, 17, 10, 23, 15.75], "the failing row takes the mean of the others"
    assert metrics == pytest.approx({"reward/letters": 5.2, "reward/picky": 1.0, "reward/failed": 1})
    assert "reward picky: 1 responses have no score" in caplog.text and "ZeroDivisionError" in caplog.text


def test_mask_leaves_a_hanging_response_out_and_scores_the_rest(single_rank):
    start = time.monotonic()
    filled, metrics = annotate([source(asleep, timeout_s=0.1)], [1.0], "mask", timeout_s=0.1)
    assert time.monotonic() - start < 0.9
    assert filled.mask.any(1).tolist() == [True, True, True, True, False] and metrics["reward/failed"] == 1


def test_a_batch_without_any_score_stops_the_run_under_mask_too(single_rank):
    with pytest.raises(RewardError, match="5 of 5 responses of this step have no finite score"):
        annotate([source(lambda p, r, m: None)], [1.0], "mask")


def test_retries_call_again_before_giving_up(single_rank):
    calls = []

    def third_time_lucky(prompts, responses, metadata):
        calls.append(len(responses))
        assert len(calls) > 2
        return [1.0] * len(responses)

    assert annotate([source(third_time_lucky, retries=2)], [1.0])[0].score.tolist() == [1.0] * 5
    assert calls == [5, 5, 5]
    calls.clear()
    with pytest.raises(RewardError, match="AssertionError"):
        annotate([source(third_time_lucky, retries=1)], [1.0])


@pytest.mark.parametrize("count", [1, 5])
def test_ranks_share_the_rows_and_agree(count):
    for score, mask, metrics in run_on_ranks(2, annotate_on_rank, "mask", count):
        assert score.tolist() == [1.0] * count
        assert mask.any(1).tolist() == [True, True, True, True, False][:count]
        assert ("reward/failed" in metrics) == (count == 5)


def test_a_failure_on_one_rank_stops_all():
    found = run_on_ranks(2, annotate_on_rank, "stop", 5)
    assert found[0] == found[1] and "rank 1: reward function" in found[0]
