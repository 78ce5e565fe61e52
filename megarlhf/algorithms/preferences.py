"""Losses that train a policy on answers it did not sample: DPO, IPO, KTO, and plain supervised fine-tuning."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megarlhf.algorithms.means import checked, loss_mean, mean, row_counts, row_means, row_sums, share
from megarlhf.algorithms.moments import count_and_mean
from megarlhf.algorithms.pairs import pairs
from megarlhf.algorithms.state import AlgorithmState
from megarlhf.config.algorithms import DPO, KTO, SFT
from megarlhf.records import Denominators, Experience, Metric, Prediction, TokenBatch
from megarlhf.records.experience import PAD
from megarlhf.records.shards import WHOLE, Shard

LossAndMetrics = tuple[Tensor, dict[str, Metric]]


def smoothed_log_loss(difference: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - e) log sigmoid(x) - e log sigmoid(-x), elementwise, finite for any finite x (conservative DPO)."""
    plain = -logsigmoid(difference)
    if label_smoothing <= 0:
        return plain
    return (1.0 - label_smoothing) * plain - label_smoothing * logsigmoid(-difference)


def sft_loss(prediction: Prediction, tokens: TokenBatch, settings: SFT, denominators: Denominators) -> LossAndMetrics:
    """-log p of every marked token, averaged as the settings say. Metric: loss/sft_avg, nats."""
    loss, metric = loss_mean(-checked(prediction, tokens), tokens, settings.loss_mean, denominators)
    return loss, {"loss/sft_avg": metric}


def dpo_loss(prediction: Prediction, tokens: TokenBatch, settings: DPO, denominators: Denominators) -> LossAndMetrics:
    """Direct preference optimisation (Rafailov et al., 2023, equation 7), mean over groups of their pairs' losses.

    With h = log p / p_ref of a response, summed over its tokens, or averaged if length_normalised:
    sigmoid  -(1 - e) log sigmoid(beta (h_w - h_l)) - e log sigmoid(-beta (h_w - h_l)), e = label_smoothing
    ipo      (h_w - h_l - 1 / (2 beta))^2 with h averaged over tokens (Azar et al., 2023, equation 17)
    Plus sft_coef * mean over pairs of the chosen response's -log p per token (Pang et al., 2024, equation 1).

    Metrics, means over groups: loss/dpo_avg without the sft_coef term; loss/sft_avg, that term before its coefficient;
    rewards/chosen, rewards/rejected and rewards/margin (beta h, summed over tokens); rewards/accuracy (a tie counts
    half); logp/chosen and logp/rejected, nats per response.
    """
    assert tokens.logp_reference is not None, "tokens lack logp_reference"
    logp, compared = checked(prediction, tokens), pairs(tokens)
    better, worse = compared.better, compared.worse
    of_rows = row_means if settings.length_normalised or settings.loss == "ipo" else row_sums
    log_ratio = of_rows(logp - tokens.logp_reference, tokens)
    margin = log_ratio[better] - log_ratio[worse]
    if settings.loss == "ipo":
        losses = (margin - 1.0 / (2.0 * settings.beta)).square()
    else:
        losses = smoothed_log_loss(settings.beta * margin, settings.label_smoothing)
    metrics: dict[str, Metric] = {"loss/dpo_avg": compared.mean(losses)}
    if settings.sft_coef > 0:
        chosen = -row_means(logp, tokens)[better]
        losses = losses + settings.sft_coef * chosen
        metrics["loss/sft_avg"] = compared.mean(chosen)
    reward, total = settings.beta * row_sums(logp - tokens.logp_reference, tokens), row_sums(logp, tokens)
    metrics |= {
        "rewards/chosen": compared.mean(reward[better]),
        "rewards/rejected": compared.mean(reward[worse]),
        "rewards/margin": compared.mean(reward[better] - reward[worse]),
        "rewards/accuracy": compared.mean(won(reward[better] - reward[worse])),
        "logp/chosen": compared.mean(total[better]),
        "logp/rejected": compared.mean(total[worse]),
    }
    return compared.share(losses, denominators.groups), metrics


def won(difference: Tensor) -> Tensor:
    """1 where the difference is positive, half where it is 0, else 0; float32."""
    return 0.5 * (1.0 + torch.sign(difference.detach().to(torch.float32)))


def kto_loss(prediction: Prediction, tokens: TokenBatch, settings: KTO, denominators: Denominators) -> LossAndMetrics:
    """Kahneman-Tversky optimisation (Ethayarajh et al., 2024, equation 8), mean over the judged answers.

    With h = log p / p_ref of the response and the reference point z0 in `margin` (`kto_credit` measured it):
    desirable    desirable_weight * (1 - sigmoid(beta (h - z0)))
    undesirable  undesirable_weight * (1 - sigmoid(beta (z0 - h)))

    Metrics: loss/kto_avg; rewards/chosen and rewards/rejected (beta h of desirable and of undesirable answers).
    """
    assert tokens.preference is not None and tokens.margin is not None, "tokens lack preference or margin"
    assert tokens.logp_reference is not None, "tokens lack logp_reference"
    log_ratio = row_sums(checked(prediction, tokens) - tokens.logp_reference, tokens)
    desirable, judged = tokens.preference > 0, row_counts(tokens) > 0
    distance = settings.beta * (log_ratio - tokens.margin)
    gain = torch.sigmoid(torch.where(desirable, distance, -distance))
    weight = torch.where(desirable, settings.desirable_weight, settings.undesirable_weight)
    losses = (weight * (1.0 - gain))[judged]
    reward = settings.beta * log_ratio
    return share(losses, denominators.rows), {
        "loss/kto_avg": mean(losses),
        "rewards/chosen": mean(reward[judged & desirable]),
        "rewards/rejected": mean(reward[judged & ~desirable]),
    }


def with_mismatched(batch: Experience, settings: KTO) -> Experience:
    """The batch, and after it every prompt once more with the next row's answer, whose preference is NaN.

    These rows only measure KTO's reference point; `kto_credit` drops them. An answer keeps its own mask. Their groups
    are new. A batch of one row is its own neighbour.
    """
    batch.require(["preference"])
    if settings.reference_point == "zero" or not batch.num_rows:
        return batch
    following = [(row + 1) % batch.num_rows for row in range(batch.num_rows)]
    heads, starts = batch.prompt_lengths, batch.prompt_lengths[following]
    answers = batch.lengths[following] - starts
    width = max(batch.tokens.shape[1], int((heads + answers).max()))
    tokens = torch.full((2 * batch.num_rows, width), PAD, dtype=torch.int64)
    mask = torch.zeros((2 * batch.num_rows, width - 1), dtype=torch.bool)
    tokens[: batch.num_rows, : batch.tokens.shape[1]] = batch.tokens
    mask[: batch.num_rows, : batch.mask.shape[1]] = batch.mask
    for row, other in enumerate(following):
        new, head, start, answer = batch.num_rows + row, int(heads[row]), int(starts[row]), int(answers[row])
        tokens[new, :head] = batch.tokens[row, :head]
        tokens[new, head : head + answer] = batch.tokens[other, start : start + answer]
        mask[new, head - 1 : head - 1 + answer] = batch.mask[other, start - 1 : start - 1 + answer]
    later = batch.group.max() + 1 + torch.arange(batch.num_rows)
    return Experience(
        tokens=tokens,
        lengths=torch.cat([batch.lengths, heads + answers]),
        prompt_lengths=torch.cat([heads, heads]),
        mask=mask,
        row_id=torch.cat([batch.row_id, batch.row_id]),
        group=torch.cat([batch.group, later]),
        finished=torch.cat([batch.finished, batch.finished[following]]),
        prompts=(*batch.prompts, *batch.prompts),
        responses=(*batch.responses, *(batch.responses[row] for row in following if batch.responses)),
        metadata=batch.metadata + batch.metadata,
        preference=torch.cat([batch.preference, torch.full((batch.num_rows,), torch.nan)]),
    )


def kto_credit(
    experience: Experience, settings: KTO, state: AlgorithmState, shard: Shard = WHOLE
) -> tuple[Experience, AlgorithmState, dict[str, float]]:
    """Drop the mismatched rows and fill margin with the reference point z0 = max(0, mean log p / p_ref of them).

    It is measured with the weights that the update starts from, which is the policy of the loss itself as long as a
    batch is one update. Metric: objective/kl, z0 in nats.
    """
    experience.require(["preference", "logp_reference"])
    mismatched = experience.preference.isnan() & experience.mask.any(dim=1)
    log_ratio = torch.zeros(len(mismatched))
    if bool(mismatched.any()):
        experience.require(["logp_start"])
        log_ratio = torch.where(experience.mask, experience.logp_start - experience.logp_reference, 0.0).sum(dim=1)
    reference_point = max(0.0, count_and_mean(log_ratio[mismatched], shard)[1])
    judged = experience.select((~experience.preference.isnan()).nonzero()[:, 0])
    margin = torch.full((judged.num_rows,), reference_point)
    return judged.replace(margin=margin), state, {"objective/kl": reference_point}


def kto_reads(settings: KTO) -> tuple[str, ...]:
    """The policy's own log-probs are needed for the reference point only."""
    own = ("logp_start",) if settings.reference_point == "mismatched" else ()
    return (*own, "logp_reference", "preference")


def sft_reads(settings: SFT) -> tuple[str, ...]:
    """Tokens and their mask are enough."""
    return ()


def dpo_reads(settings: DPO) -> tuple[str, ...]:
    """The reference's log-probs and which answer is preferred."""
    return ("logp_reference", "preference")
