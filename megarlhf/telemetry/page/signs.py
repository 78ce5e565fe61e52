"""Signs of trouble in a run's numbers and texts, in words: what is seen, since when, and what to look at.

Each sign compares the run with itself: its first fifth with its last, or one number with another. They are hints with
their figures, not verdicts.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megarlhf.telemetry.page.record import RunRecord

ROUNDING = {"float32": 0.01, "bfloat16": 0.5}
"""Nats by which no token's log-prob differs between sampler and trainer through rounding alone, by actor.dtype. The
largest of a step is about 1e-5 in float32; up to 0.2 was seen in bfloat16."""
ROUNDING_FP8 = 1.0
"""The same where a side computes in eight bits."""


@dataclass(frozen=True)
class Sign:
    """What is seen, and the next move."""

    name: str
    words: str


def signs(run: RunRecord) -> list[Sign]:
    """Every sign that shows, in the order of the checks."""
    found = (check(run) for check in _CHECKS)
    return [sign for sign in found if sign is not None]


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Pearson's; 0 where one of them does not vary."""
    if len(xs) < 3 or len(set(xs)) == 1 or len(set(ys)) == 1:
        return 0.0
    return statistics.correlation(xs, ys)


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and the last fifth (at least one value each)."""
    count = max(1, len(values) // 5)
    return statistics.fmean(values[:count]), statistics.fmean(values[-count:])


def _length_pays(run: RunRecord) -> Sign | None:
    rows = [row for row in run.samples if "score" in row and row.get("tokens")]
    late = rows[len(rows) // 2 :]
    found = correlation([row["tokens"] for row in late], [row["score"] for row in late])
    if len(late) < 20 or found < 0.5:
        return None
    return Sign(
        "score follows length",
        f"in the later half of the sampled texts score and length correlate with {found:.2f}: longer answers may "
        "be what is rewarded. Read the longest ones; normalise the score by length, or set "
        "algorithm.overlong_length",
    )


def _kl_spike(run: RunRecord) -> Sign | None:
    steps, values = run.series("objective/kl")
    found = []
    for index in range(5, len(values)):
        before = max(values[max(0, index - 10) : index])  # against their median steady growth would be a spike too
        if before > 0.5 and values[index] > 3 * before:  # from nearly 0 every rise is a multiple
            found.append((steps[index], values[index], before))
    if not found:
        return None
    step, value, before = max(found, key=lambda one: one[1] / one[2])
    return Sign(
        "KL spike",
        f"at step {step} the KL to the reference is {value:.2f} nats, {value / before:.1f} times the largest of "
        "the ten steps before. Lower the learning rate, or set algorithm.target_kl",
    )


def _entropy_collapse(run: RunRecord) -> Sign | None:
    _, values = run.series("objective/entropy")
    if len(values) < 5:
        return None
    first, last = ends(values)
    if last > 0.3 * first:
        return None
    return Sign(
        "entropy collapse",
        f"the entropy per token fell from {first:.2f} to {last:.2f} nats: sampling hardly explores any more. Raise "
        "algorithm.kl_coef or algorithm.entropy_coef, or stop earlier",
    )


def _ends_lost(run: RunRecord) -> Sign | None:
    rows = [row for row in run.samples if "finished" in row]
    if len(rows) < 20:
        return None
    first, last = ends([float(row["finished"]) for row in rows])
    if first < 0.5 or last > 0.5 * first:
        return None
    return Sign(
        "answers no longer end",
        f"{first:.0%} of the first sampled answers ended by themselves, {last:.0%} of the last. Set "
        "algorithm.missing_eos_penalty, or raise rollout.max_new_tokens",
    )


def _duplicates(run: RunRecord) -> Sign | None:
    late = [row["response"] for row in run.samples[len(run.samples) // 2 :] if row.get("response")]
    if len(late) < 10:
        return None
    text, count = Counter(late).most_common(1)[0]
    share = 1 - len(set(late)) / len(late)
    if share < 0.3:
        return None
    return Sign(
        "duplicate texts",
        f"{share:.0%} of the later sampled answers repeat another one, the most frequent {count} times "
        f"({text[:60]!r}). The policy may have found one answer that always pays",
    )


def _gap(run: RunRecord) -> Sign | None:
    steps, values = run.series("rollout/logp_gap_max")
    training = run.setting("actor.fp8.recipe") or "off"
    sampling = run.setting("actor.generate_fp8.recipe") or training
    in_fp8 = {training, sampling} != {"off"}
    if not values or max(values) < (ROUNDING_FP8 if in_fp8 else ROUNDING[run.setting("actor.dtype") or "float32"]):
        return None
    differ = "Sample and train in the same precision (actor.generate_fp8)"
    same = "Rounding alone does not do that: look for the cause with `megarlhf verify-layout`"
    return Sign(
        "sampler and trainer differ",
        f"a sampled token's log-prob differed by {max(values):.2f} nats between sampler and trainer (step "
        f"{steps[values.index(max(values))]}). {same if sampling == training else differ}, or set "
        "algorithm.importance_cap",
    )


def _no_signal(run: RunRecord) -> Sign | None:
    _, idle = run.series("objective/groups_without_signal")
    _, scores = run.series("objective/scores")
    if idle and ends(idle)[1] >= 0.9:
        seen = f"{ends(idle)[1]:.0%} of the prompts in the last steps have responses that are all rewarded alike"
    elif not idle and len(scores) >= 5 and len(set(scores)) == 1:
        seen = "every step has the same mean score"
    else:
        return None
    score = f" (the mean score is {ends(scores)[1]:.3g})" if scores else ""
    return Sign(
        "nothing to learn from",
        f"{seen}{score}: no response is better than another. Look at single texts and their scores: the reward can "
        "never be earned, or always is; try other prompts, a finer reward, a higher rollout.temperature, or more "
        "rollout.samples_per_prompt",
    )


def _skipped(run: RunRecord) -> Sign | None:
    steps, values = run.series("updates/skipped")
    if not sum(values):
        return None
    return Sign(
        "skipped updates",
        f"{sum(values):.0f} updates had a gradient that was not finite and were not applied, first in step "
        f"{steps[0]}. Lower the learning rate; look at the texts and scores of that step",
    )


def _not_finite(run: RunRecord) -> Sign | None:
    broken = {name: row["step"] for row in reversed(run.steps) for name, value in row.items() if value is None}
    if not broken:
        return None
    listed = ", ".join(f"{name} (step {step})" for name, step in sorted(broken.items()))
    return Sign("numbers that are not finite", f"first seen: {listed}")


def _critic_is_blind(run: RunRecord) -> Sign | None:
    _, values = run.series("val/explained_variance")
    if len(values) < 10 or math.isnan(ends(values)[1]) or ends(values)[1] > 0:
        return None
    return Sign(
        "the critic explains nothing",
        f"the explained variance of its values is {ends(values)[1]:.2f} in the last steps; a constant would do as "
        "well. Raise critic.optimizer.learning_rate, or start it from the reward model",
    )


_CHECKS: tuple[Callable[[RunRecord], Sign | None], ...] = (
    _not_finite,
    _skipped,
    _no_signal,
    _length_pays,
    _kl_spike,
    _entropy_collapse,
    _ends_lost,
    _duplicates,
    _gap,
    _critic_is_blind,
)
