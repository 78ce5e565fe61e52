"""Losses of a reward model, read at the tokens that the mask marks.

The mask decides the form: one marked token, the last, is the usual reward model; all tokens from the point where two
answers part are DeepSpeed-Chat's per-token form. A flat score per answer is the one at its last marked token.
"""

import torch
from torch import Tensor

from megarlhf.algorithms.means import checked, mean, row_counts, row_means, share
from megarlhf.algorithms.pairs import Pairs, pairs
from megarlhf.algorithms.preferences import smoothed_log_loss, won
from megarlhf.config.algorithms import RewardModelling
from megarlhf.records import Denominators, Mean, Metric, Prediction, TokenBatch

LossAndMetrics = tuple[Tensor, dict[str, Metric]]
CONFIDENCE_EDGES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Bins of the calibration metrics."""


def reward_loss(
    prediction: Prediction, tokens: TokenBatch, settings: RewardModelling, denominators: Denominators
) -> LossAndMetrics:
    """`preference_loss`, `regression_loss` or, with attributes, `attributes_loss`, as the settings say.

    Besides their own metrics: scores/avg, the mean of the answers' scores.
    """
    if settings.attributes:
        return attributes_loss(prediction, tokens, settings, denominators)
    score = last_scores(checked(prediction, tokens), tokens)[row_counts(tokens) > 0]
    kind = preference_loss if settings.loss == "preference" else regression_loss
    loss, metrics = kind(prediction, tokens, settings, denominators)
    return loss, metrics | {"scores/avg": mean(score)}


def preference_loss(
    prediction: Prediction, tokens: TokenBatch, settings: RewardModelling, denominators: Denominators
) -> LossAndMetrics:
    """Bradley-Terry over all pairs of a group, mean over groups (Ouyang et al., InstructGPT, 2022, equation 1).

    Per pair, with d = s_w - s_l - m at every compared position and then averaged over positions:
    -(1 - e) log sigmoid(d) - e log sigmoid(-d), e = label_smoothing; m is the better answer's margin (Touvron et al.,
    Llama 2, 2023, equation 2) with `margins`, else 0. Plus centring_coef * (s_w + s_l)^2 (Eisenstein et al., 2023).
    Compared positions: the k-th marked token of one answer with the k-th of the other, up to the longer one's end,
    where the shorter one's last score stands in: padding is never compared. One marked token each: the usual loss.

    Metrics, means over groups: loss/reward_avg; rewards/accuracy (by the answers' scores; a tie counts half),
    rewards/margin, rewards/chosen, rewards/rejected; calibration/brier, the mean (1 - sigmoid(s_w - s_l))^2; and by
    confidence c = sigmoid(|s_w - s_l|), calibration/confidence_c and calibration/accuracy_c for the bins of
    CONFIDENCE_EDGES, which agree for a calibrated model.
    """
    value, compared = checked(prediction, tokens), pairs(tokens)
    first, second, both = _aligned(value, tokens, compared)
    margin: float | Tensor = 0.0
    if settings.margins:
        assert tokens.margin is not None, "tokens lack margin"
        margin = tokens.margin[compared.better][:, None]
    losses = smoothed_log_loss(first - second - margin, settings.label_smoothing)
    losses = torch.where(both, losses, 0.0).sum(1) / both.sum(1).clamp(min=1)
    score = last_scores(value, tokens)
    chosen, rejected = score[compared.better], score[compared.worse]
    if settings.centring_coef > 0:
        losses = losses + settings.centring_coef * (chosen + rejected).square()
    metrics: dict[str, Metric] = {
        "loss/reward_avg": compared.mean(losses),
        "rewards/chosen": compared.mean(chosen),
        "rewards/rejected": compared.mean(rejected),
        "rewards/margin": compared.mean(chosen - rejected),
        "rewards/accuracy": compared.mean(won(chosen - rejected)),
    }
    return compared.share(losses, denominators.groups), metrics | calibration(chosen - rejected)


def regression_loss(
    prediction: Prediction, tokens: TokenBatch, settings: RewardModelling, denominators: Denominators
) -> LossAndMetrics:
    """Squared error to the answer's score at every marked token, averaged over its tokens and then over answers.

    Metrics: loss/reward_avg; rewards/error, the mean absolute error at the last marked token.
    """
    assert tokens.score is not None, "tokens lack score"
    value, valid = checked(prediction, tokens), row_counts(tokens) > 0
    losses = row_means((value - tokens.score[tokens.row]).square(), tokens)[valid]
    error = (last_scores(value, tokens) - tokens.score).abs()[valid]
    return share(losses, denominators.rows), {"loss/reward_avg": mean(losses), "rewards/error": mean(error)}


def attributes_loss(
    prediction: Prediction, tokens: TokenBatch, settings: RewardModelling, denominators: Denominators
) -> LossAndMetrics:
    """Mean squared error to several scores of an answer (Wang et al., HelpSteer, 2023, section 3: a linear layer on the
    last token, one output per attribute).

    At every marked token the mean over the attributes k that the answer has of (v_k - s_k)^2; averaged over its tokens,
    then over answers. A missing attribute (NaN) is in neither numerator nor denominator, and its row of the head gets
    no gradient from the answer.

    Metrics: loss/reward_avg; of each attribute rewards/error/NAME, the mean absolute error at the last marked token,
    and scores/NAME, the mean score there.
    """
    assert tokens.attributes is not None, "tokens lack attributes"
    wanted = tokens.attributes[tokens.row]
    value = prediction.value.reshape(wanted.shape)
    given = wanted.isfinite()
    error = torch.where(given, value - wanted.nan_to_num(), 0.0)
    valid = row_counts(tokens) > 0
    losses = row_means(error.square().sum(1) / given.sum(1).clamp(min=1), tokens)[valid]
    is_last = tokens.row != torch.cat([tokens.row[1:], tokens.row.new_full((1,), tokens.num_rows)])[: len(tokens.row)]
    metrics: dict[str, Metric] = {"loss/reward_avg": mean(losses)}
    for place, name in enumerate(settings.attributes):
        metrics[f"rewards/error/{name}"] = mean(error[is_last & given[:, place], place].abs())
        metrics[f"scores/{name}"] = mean(value[is_last, place])
    return share(losses, denominators.rows), metrics


def last_scores(value: Tensor, tokens: TokenBatch) -> Tensor:
    """[R]: value [N] at each row's last marked token; 0 for a row without one."""
    counts = row_counts(tokens).to(torch.int64)
    last = (counts.cumsum(0) - 1).clamp(min=0)
    if not value.numel():
        return value.new_zeros(tokens.num_rows) + 0.0 * value.sum()
    return torch.where(counts > 0, value[last], 0.0)


def calibration(difference: Tensor) -> dict[str, Metric]:
    """Brier score and reliability bins of score differences [P], better less worse; every pair counts the same."""
    difference = difference.detach().to(torch.float32)
    metrics: dict[str, Metric] = {"calibration/brier": mean((1.0 - torch.sigmoid(difference)).square())}
    confidence = torch.sigmoid(difference.abs())
    for low, high in zip(CONFIDENCE_EDGES, CONFIDENCE_EDGES[1:], strict=False):
        inside = (confidence >= low) & ((confidence < high) | (high == 1.0))
        metrics[f"calibration/confidence_{low}-{high}"] = mean(confidence[inside])
        metrics[f"calibration/accuracy_{low}-{high}"] = mean(won(difference)[inside])
    return metrics


def calibration_error(metrics: dict[str, Metric]) -> float:
    """Expected calibration error of (merged) `calibration` metrics: mean |confidence - accuracy| over pairs, by bin.

    0 when there is no pair.
    """
    gaps, pairs_seen = 0.0, 0.0
    for low, high in zip(CONFIDENCE_EDGES, CONFIDENCE_EDGES[1:], strict=False):
        confidence, accuracy = (metrics[f"calibration/{kind}_{low}-{high}"] for kind in ("confidence", "accuracy"))
        assert isinstance(confidence, Mean) and isinstance(accuracy, Mean), "calibration metrics are means"
        gaps += abs(float(confidence.total) - float(accuracy.total))
        pairs_seen += float(confidence.weight)
    return gaps / max(pairs_seen, 1.0)


def reward_reads(settings: RewardModelling) -> tuple[str, ...]:
    """Which answer is preferred, or its score."""
    if settings.loss == "regression":
        return ("attributes",) if settings.attributes else ("score",)
    return ("preference", "margin") if settings.margins else ("preference",)


def _aligned(value: Tensor, tokens: TokenBatch, compared: Pairs) -> tuple[Tensor, Tensor, Tensor]:
    """([P, L] scores of the better rows, of the worse rows, [P, L] bool: compared), L the longest answer's tokens."""
    counts = row_counts(tokens).to(torch.int64)
    starts = counts.cumsum(0) - counts
    longer = torch.maximum(counts[compared.better], counts[compared.worse])
    step = torch.arange(int(longer.max()) if longer.numel() else 0, device=value.device)

    def scores(rows: Tensor) -> Tensor:
        return value[starts[rows][:, None] + torch.minimum(step, counts[rows][:, None] - 1)]

    return scores(compared.better), scores(compared.worse), step < longer[:, None]
