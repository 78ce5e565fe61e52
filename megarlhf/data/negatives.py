"""Spoilt answers: what a reward model must not like, made from good answers (another prompt's, cut short, repeated).

Which examples are spoilt, and how, is a pure function of (seed, epoch, row).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from megarlhf.config.corpus import Negatives
from megarlhf.data.examples import Answer, Example


def spoil(
    example: Example, examples: Sequence[Example], settings: Negatives, max_tokens: int, *, seed: int, epoch: int
) -> Example:
    """With probability `settings.share`, the example's best answer (preferred) and a spoilt one; otherwise as it is.

    A spoilt answer is made of `examples` and of the best answer, has at most `max_tokens` with its prompt, and ends as
    the best one does (with its stop token, or without), so that the end alone tells nothing. When no kind of spoiling
    changes the answer, the example stays as it is.
    """
    rng = random.Random(f"negatives {seed} {epoch} {example.row_id}")
    if rng.random() >= settings.share:
        return example
    best = _best(example)
    content, end = _parts(best)
    room = max_tokens - len(example.prompt_ids) - len(end)
    for kind in rng.sample(settings.kinds, len(settings.kinds)):
        ids = _SPOILT[kind](content, examples, rng)[:room] + end
        if ids and ids != best.token_ids:
            spoilt = Answer(ids, f"({kind})", best.finished, preference=0.0)
            return example.with_answers((replace(best, preference=1.0, margin=None), spoilt))
    return example


def _best(example: Example) -> Answer:
    return max(example.answers, key=_preference)


def _preference(answer: Answer) -> float:
    assert answer.preference is not None, "only comparisons have a best answer"
    return answer.preference


def _parts(answer: Answer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Its tokens without and from its stop token."""
    num_content = len(answer.token_ids) - int(answer.finished)
    return answer.token_ids[:num_content], answer.token_ids[num_content:]


def _shuffled(content: tuple[int, ...], examples: Sequence[Example], rng: random.Random) -> tuple[int, ...]:
    """The best answer to some prompt."""
    return _parts(_best(rng.choice(examples)))[0]


def _truncated(content: tuple[int, ...], examples: Sequence[Example], rng: random.Random) -> tuple[int, ...]:
    """The first tokens: at least one, and not all."""
    return content[: rng.randrange(1, max(2, len(content)))]


def _repeated(content: tuple[int, ...], examples: Sequence[Example], rng: random.Random) -> tuple[int, ...]:
    """The answer, then its last tokens again and again, until it is at least twice as long."""
    if not content:
        return ()
    tail = content[-rng.randint(1, len(content)) :]
    return content + tail * -(-len(content) // len(tail))


_SPOILT: dict[str, Callable[[tuple[int, ...], Sequence[Example], random.Random], tuple[int, ...]]] = {
    "shuffled": _shuffled,
    "truncated": _truncated,
    "repeated": _repeated,
}
