"""What flows between the stages of a step: frozen records whose shapes and meaning are declared once.

Letters: B rows (sequences), S positions, T = S-1 next-token positions, N valid tokens of a flat batch.
"""

from megarlhf.records.experience import Experience
from megarlhf.records.metrics import Maximum, Mean, Metric, Total, merge_metrics, metric_results
from megarlhf.records.packing import PackedRows, in_input_order, pack, pack_rows
from megarlhf.records.prompts import Prompt, Sample, siblings
from megarlhf.records.tokens import Denominators, Prediction, TokenBatch

__all__ = [
    "Denominators",
    "Experience",
    "Maximum",
    "Mean",
    "Metric",
    "PackedRows",
    "Prediction",
    "Prompt",
    "Sample",
    "TokenBatch",
    "Total",
    "in_input_order",
    "merge_metrics",
    "metric_results",
    "pack",
    "pack_rows",
    "siblings",
]
