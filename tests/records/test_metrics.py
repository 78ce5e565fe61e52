"""Claims about additive metrics."""

import torch

from megarlhf.records import Maximum, Mean, Total, merge_metrics, metric_results
from megarlhf.records.metrics import metric_vectors, metrics_from_vectors

LOSSES = [[4.0], [1.0, 1.0, 1.0], [2.0, 2.0], []]


def part(rows):
    values = torch.tensor([value for row in rows for value in LOSSES[row]])
    top = float(values.max()) if len(values) else float("-inf")
    return {"mean": Mean(values.sum(), len(values)), "top": Maximum(top), "count": Total(float(len(values)))}


def test_results_do_not_depend_on_the_split():
    for split in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[3], [2], [1], [0]]):
        results = metric_results(merge_metrics(part(rows) for rows in split))
        assert results.keys() == {"mean", "top", "count"}
        assert abs(results["mean"] - 11 / 6) < 1e-6 and results["top"] == 4.0 and results["count"] == 6.0


def test_what_was_not_counted_is_absent_not_zero():
    assert metric_results(part([3])) == {"count": 0.0}


def test_metrics_survive_a_reduction_over_ranks():
    parts = [part([0, 1]), part([2])]
    vectors = [metric_vectors(metrics) for metrics in parts]
    addends = sum(vector[0] for vector in vectors)
    maxima = torch.stack([vector[1] for vector in vectors]).amax(dim=0)
    reduced = metric_results(metrics_from_vectors(parts[1], addends, maxima))
    assert reduced == metric_results(merge_metrics(parts))


def test_a_name_may_be_missing_from_a_part():
    assert metric_results(merge_metrics([{"a": Total(1.0)}, {"b": Total(2.0), "a": Total(3.0)}])) == {
        "a": 4.0,
        "b": 2.0,
    }
