"""What becomes of rows that are too long, and of rows that teach nothing: an error, a cut, or dropped and counted."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megarlhf.config.corpus import Corpus
from megarlhf.data.encoding import Encoder
from megarlhf.data.examples import Answer, Example
from megarlhf.data.prompts import cut
from megarlhf.errors import DataError

CUT = "cut"
"""Counts rows that were cut and kept; every other outcome counts rows that were dropped."""


@dataclass(frozen=True)
class Draft:
    """A row as it was written: of a plain text, a plain prompt with answers, or a chat."""

    form: Literal["text", "plain", "chat"]
    example: Example


def fit(draft: Draft, settings: Corpus, section: str, encoder: Encoder, outcomes: Counter[str]) -> list[Example]:
    """The examples that a row gives: one; several pieces of a text; none when it is dropped, which `outcomes` counts.

    Raises DataError for a row that is too long for `settings` and may not be dropped or cut.
    """
    if not all(answer.token_ids for answer in draft.example.answers):
        outcomes["without a token to learn from"] += 1
        return []
    if draft.example.num_tokens <= settings.max_tokens:
        return _worthwhile([draft.example], outcomes)
    if settings.too_long == "drop":
        outcomes["too long"] += 1
        return []
    _check_may_be_cut(draft, settings, section)
    pieces = _CUTS["text" if draft.form == "text" else settings.too_long](draft.example, settings, encoder)
    outcomes[CUT if pieces else "whose prompt or answer leaves no room for the other"] += 1
    return _worthwhile(pieces, outcomes)


def _check_may_be_cut(draft: Draft, settings: Corpus, section: str) -> None:
    too_long = f"the row has {draft.example.num_tokens} tokens, more than {section}.max_tokens {settings.max_tokens}"
    if settings.too_long == "error":
        others = "truncate_left, truncate_right or split" if draft.form == "text" else "truncate_left or truncate_right"
        raise DataError(f"{too_long}; raise it, or set {section}.too_long to drop, {others}")
    if settings.too_long == "split" and draft.form != "text":
        raise DataError(f"{too_long}, and {section}.too_long split is for rows of plain text; choose drop, for example")
    if settings.too_long == "truncate_left" and draft.form == "chat":
        raise DataError(
            f"{too_long}, and cutting a chat at its start ({section}.too_long truncate_left) would break its template; "
            "raise the limit or set too_long to drop or truncate_right"
        )


def _cut_text(example: Example, settings: Corpus, encoder: Encoder) -> list[Example]:
    """One end of a text; or all of it in pieces that overlap by a token, so that every token is predicted once."""
    ids, limit = example.prompt_ids + example.answers[0].token_ids, settings.max_tokens
    if settings.too_long == "split":
        parts = [ids[start : start + limit] for start in range(0, len(ids) - 1, limit - 1)]
    else:
        parts = [cut(ids, limit, settings.too_long, encoder.tokenizer.bos_id)]
    return [
        replace(example, prompt_ids=part[:1], prompt=encoder.decode(part[:1]), answers=(encoder.as_it_is(part[1:]),))
        for part in parts
    ]


def _cut_prompt(example: Example, settings: Corpus, encoder: Encoder) -> list[Example]:
    """The end of the prompt, as much of it as the longest answer leaves room for."""
    room = settings.max_tokens - (example.num_tokens - len(example.prompt_ids))
    if room < 1:
        return []
    ids = cut(example.prompt_ids, room, "truncate_left", encoder.tokenizer.bos_id)
    return [replace(example, prompt_ids=ids, prompt=encoder.decode(ids))]


def _cut_answers(example: Example, settings: Corpus, encoder: Encoder) -> list[Example]:
    """The start of each answer. No end token is put where it was cut: the answer did not end there."""
    room = settings.max_tokens - len(example.prompt_ids)
    if room < 1:
        return []
    return [example.with_answers(tuple(_cut_answer(answer, room, encoder) for answer in example.answers))]


def _cut_answer(answer: Answer, room: int, encoder: Encoder) -> Answer:
    if len(answer.token_ids) <= room:
        return answer
    kept = encoder.as_it_is(answer.token_ids[:room])
    trained = None if answer.trained is None else answer.trained[:room]
    return replace(answer, token_ids=kept.token_ids, text=kept.text, finished=kept.finished, trained=trained)


_CUTS: dict[str, Callable[[Example, Corpus, Encoder], list[Example]]] = {
    "text": _cut_text,
    "truncate_left": _cut_prompt,
    "truncate_right": _cut_answers,
}


def _worthwhile(examples: Sequence[Example], outcomes: Counter[str]) -> list[Example]:
    """The examples that teach something; comparisons without the answers that repeat an earlier one."""
    kept = []
    for example in examples:
        distinct = _distinct(example.answers)
        is_comparison = len(example.answers) > 1
        if is_comparison and len(distinct) < 2:
            outcomes["with identical answers"] += 1
        elif is_comparison and len({answer.preference for answer in distinct}) < 2:
            outcomes["without a preference"] += 1
        elif not any(answer.trained is None or any(answer.trained) for answer in example.answers):
            outcomes["without a token to learn from"] += 1
        else:
            kept.append(example.with_answers(distinct))
    return kept


def _distinct(answers: Sequence[Answer]) -> tuple[Answer, ...]:
    """Of answers that are equal token for token, the first."""
    first: dict[tuple[int, ...], Answer] = {}
    for answer in answers:
        first.setdefault(answer.token_ids, answer)
    return tuple(first.values())
