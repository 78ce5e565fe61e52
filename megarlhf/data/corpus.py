"""Data sets that are learnt from as they are written: rows of a file become prompts and answers in token ids.

Three kinds of row: demonstrations (a conversation, a prompt with its response, or a plain text), preferences (chosen
and rejected, or several ranked responses), and answers with a grade (a score, several, or a label). Prompts and
responses are texts or lists of turns (encoding.py), and a response may be called completion. Every bad row is reported;
rows that are dropped are counted and logged.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megarlhf.config.corpus import Corpus
from megarlhf.data.encoding import Encoder, Written, check_written, shared_prompt
from megarlhf.data.examples import Answer, Example
from megarlhf.data.files import check_text, lines, read_each, type_name
from megarlhf.data.fitting import CUT, Draft, fit
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.errors import DataError

log = logging.getLogger(__name__)

Row = dict[str, Any]

_READ = {
    "messages",
    "text",
    "prompt",
    "response",
    "chosen",
    "rejected",
    "margin",
    "responses",
    "ranks",
    "score",
    "scores",
    "label",
}
"""Keys that say something here; the others are metadata."""
_ANSWERS = {"messages", "text", "response", "chosen", "responses"}
"""Keys that say which kind a row is."""
_LARGEST = torch.finfo(torch.float32).max


def read_demonstrations(settings: Corpus, tokenizer: Tokenizer, section: str = "data") -> list[Example]:
    """Rows `{"messages": [...]}`, `{"prompt", "response"}` or `{"text"}`, in file order; one answer each.

    In conversations all turns of the assistant are trained; of a plain text every token but the first, which nothing
    predicts. `section` is the name of `settings` in error messages. Raises DataError for rows that cannot be used, and
    when no example is left.
    """
    return _read(settings, tokenizer, section, _demonstration)


def read_preferences(settings: Corpus, tokenizer: Tokenizer, section: str = "data") -> list[Example]:
    """Rows `{"prompt", "chosen", "rejected", "margin"?}` or `{"prompt", "responses", "ranks"}` (1 is the best rank).

    `preference` is 1 and 0, or minus the rank. Answers that are equal token for token, as written or once they are cut,
    say nothing: only the first of them is kept, and rows without two answers of different rank are dropped.
    """
    return _read(settings, tokenizer, section, _preference)


def read_margins(settings: Corpus, tokenizer: Tokenizer, section: str = "data") -> list[Example]:
    """As `read_preferences`, of a data set in which some row has a margin."""
    examples = read_preferences(settings, tokenizer, section)
    if all(answer.margin is None for example in examples for answer in example.answers):
        raise DataError(
            f"{section}.path: no row of {settings.path} has a margin; correct the file's keys, or set "
            "algorithm.margins to false"
        )
    return examples


def read_scored(settings: Corpus, tokenizer: Tokenizer, section: str = "data") -> list[Example]:
    """Rows `{"prompt", "response", "score"}`: one answer each, with `score`."""
    return _read(settings, tokenizer, section, _scored)


def read_labelled(settings: Corpus, tokenizer: Tokenizer, section: str = "data") -> list[Example]:
    """Rows `{"prompt", "response", "label"}` (KTO): one answer each, with `preference` 1 (label true) or 0."""
    return _read(settings, tokenizer, section, _labelled)


def attributes_reader(names: Sequence[str]) -> Callable[..., list[Example]]:
    """Reads rows `{"prompt", "response", "scores"}` like the other readers: one answer each, with `attributes`.

    `scores` is an object with the attributes `names`, or a list in their order. One that is absent or null is missing;
    a row without any is an error, and so is an attribute that no row has. Instead of under `scores` the attributes may
    stand in the row itself.
    """

    def read(settings: Corpus, tokenizer: Tokenizer, section: str = "data") -> list[Example]:
        examples = _read(settings, tokenizer, section, partial(_attributed, tuple(names)))
        rows = [answer.attributes for example in examples for answer in example.answers]
        lacking = [name for place, name in enumerate(names) if all(row is None or row[place] is None for row in rows)]
        if lacking:
            raise DataError(
                f"{section}.path: no row of {settings.path} has a score for {', '.join(lacking)}; correct "
                "algorithm.attributes, or the file's keys"
            )
        return examples

    return read


def _read(
    settings: Corpus, tokenizer: Tokenizer, section: str, convert: Callable[[Row, Encoder, int], Draft]
) -> list[Example]:
    encoder = Encoder(tokenizer, settings.append_eos)
    outcomes: Counter[str] = Counter()
    rows = read_each(
        lines(settings.path, f"{section}.path", settings.split),
        lambda line: fit(
            convert(_in_our_words(line.values()), encoder, line.row), settings, section, encoder, outcomes
        ),
        settings,
        section,
    )
    examples = [example for pieces in rows for example in pieces]
    _report(settings, section, len(rows), len(examples), outcomes)
    return examples


def _in_our_words(row: Row) -> Row:
    """The row with its answer under response, where it has one under TRL's name only."""
    if "completion" not in row or _ANSWERS & row.keys():
        return row
    return {"response" if name == "completion" else name: value for name, value in row.items()}


def _demonstration(row: Row, encoder: Encoder, number: int) -> Draft:
    given = [name for name in ("messages", "response", "text") if name in row]
    if len(given) != 1:
        found = " and ".join(given) if given else f"none of them (its keys are {sorted(row)})"
        raise DataError(f"a row has messages, or prompt and response, or text; this one has {found}")
    return {"messages": _conversation, "response": _answered, "text": _plain_text}[given[0]](row, encoder, number)


def _conversation(row: Row, encoder: Encoder, number: int) -> Draft:
    messages = row["messages"]
    if not isinstance(messages, list):
        raise DataError(f"messages is {type_name(messages)}; give a list of turns")
    check_text("messages", messages)
    prompt_ids, answer = encoder.conversation(messages)
    return Draft("chat", Example(number, prompt_ids, encoder.decode(prompt_ids), (answer,), _metadata(row)))


def _plain_text(row: Row, encoder: Encoder, number: int) -> Draft:
    text = row["text"]
    if not isinstance(text, str):
        raise DataError(f"text is {type_name(text)}; give a text")
    _check_not_blank("text", text)
    check_text("text", text)
    whole = encoder.ended(encoder.prompt(text), text)
    first, rest = whole.token_ids[:1], whole.token_ids[1:]
    example = Example(number, first, encoder.decode(first), (replace(whole, token_ids=rest),), _metadata(row))
    return Draft("text", example)


def _answered(row: Row, encoder: Encoder, number: int) -> Draft:
    _require(row, "response")
    return _draft(row, encoder, number, {"response": row["response"]})


def _preference(row: Row, encoder: Encoder, number: int) -> Draft:
    if "responses" in row and ("chosen" in row or "rejected" in row):
        raise DataError(
            f"a row has chosen and rejected, or responses and ranks; this one has keys of both ({sorted(row)})"
        )
    return _ranking(row, encoder, number) if "responses" in row else _pair(row, encoder, number)


def _pair(row: Row, encoder: Encoder, number: int) -> Draft:
    _require(row, "chosen", "rejected")
    draft = _draft(row, encoder, number, {"chosen": row["chosen"], "rejected": row["rejected"]})
    margin = _number("margin", row["margin"]) if "margin" in row else None
    chosen, rejected = draft.example.answers
    return _with_answers(draft, replace(chosen, preference=1.0, margin=margin), replace(rejected, preference=0.0))


def _ranking(row: Row, encoder: Encoder, number: int) -> Draft:
    _require(row, "responses", "ranks")
    responses, ranks = row["responses"], row["ranks"]
    for name, value in (("responses", responses), ("ranks", ranks)):
        if not isinstance(value, list) or len(value) < 2:
            raise DataError(f"{name} is {value!r:.60}; give a list of at least two")
    if len(responses) != len(ranks):
        raise DataError(f"{len(responses)} responses have {len(ranks)} ranks; give each response its rank, 1 the best")
    draft = _draft(row, encoder, number, {f"responses[{at}]": response for at, response in enumerate(responses)})
    preferences = [-_number(f"ranks[{at}]", rank) for at, rank in enumerate(ranks)]
    pairs = zip(draft.example.answers, preferences, strict=True)
    return _with_answers(draft, *(replace(answer, preference=preference) for answer, preference in pairs))


def _scored(row: Row, encoder: Encoder, number: int) -> Draft:
    _require(row, "response", "score")
    score = float(row["score"]) if isinstance(row["score"], bool) else _number("score", row["score"])
    draft = _answered(row, encoder, number)
    return _with_answers(draft, replace(draft.example.answers[0], score=score))


def _attributed(names: tuple[str, ...], row: Row, encoder: Encoder, number: int) -> Draft:
    _require(row, "response")
    scores = row.get("scores", {name: row[name] for name in names if name in row})
    if isinstance(scores, list):
        if len(scores) != len(names):
            raise DataError(f"scores has {len(scores)} entries; give {len(names)}: {', '.join(names)}, null if missing")
        scores = dict(zip(names, scores, strict=True))
    if not isinstance(scores, dict):
        raise DataError(
            f"scores is {type_name(scores)}; give an object with {', '.join(names)}, or a list in this order"
        )
    found = tuple(None if scores.get(name) is None else _number(f"scores.{name}", scores[name]) for name in names)
    if all(value is None for value in found):
        raise DataError(f"the row has none of the scores {', '.join(names)}; its keys are {sorted(row)}")
    draft = _answered({key: value for key, value in row.items() if key not in names}, encoder, number)
    return _with_answers(draft, replace(draft.example.answers[0], attributes=found))


def _labelled(row: Row, encoder: Encoder, number: int) -> Draft:
    _require(row, "response", "label")
    if row["label"] not in (True, False):
        raise DataError(f"label is {row['label']!r:.60}; give true (desirable) or false")
    draft = _answered(row, encoder, number)
    return _with_answers(draft, replace(draft.example.answers[0], preference=float(row["label"])))


def _draft(row: Row, encoder: Encoder, number: int, answers: dict[str, Written]) -> Draft:
    """The prompt of a row with `answers` (under their names in messages), of which nothing is said yet."""
    prompt = row.get("prompt")
    for name, value in {**({"prompt": prompt} if "prompt" in row else {}), **answers}.items():
        check_written(name, value)
    if isinstance(prompt, str):
        _check_not_blank("prompt", prompt)
    prompt, texts = shared_prompt(prompt, list(answers.values()))
    ids = encoder.prompt(prompt)
    encoded = tuple(encoder.answer(prompt, ids, text) for text in texts)
    example = Example(number, ids, encoder.tokenizer.prompt_text(prompt), encoded, _metadata(row))
    return Draft("plain" if isinstance(prompt, str) else "chat", example)


def _with_answers(draft: Draft, *answers: Answer) -> Draft:
    return replace(draft, example=draft.example.with_answers(answers))


def _metadata(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in _READ}


def _require(row: Row, *names: str) -> None:
    missing = [name for name in names if name not in row]
    if missing:
        raise DataError(f"the row has no {' and no '.join(missing)}; its keys are {sorted(row)}")


def _check_not_blank(name: str, text: str) -> None:
    if not text.strip():
        raise DataError(f"{name} is empty or blank; give a text")


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{name} is {type_name(value)}; give a number")
    if not abs(value) <= _LARGEST:
        raise DataError(f"{name} is {str(value):.40}; give a finite number (float32)")
    return float(value)


def _report(settings: Corpus, section: str, num_rows: int, num_left: int, outcomes: Counter[str]) -> None:
    dropped = ", ".join(f"{count} {reason}" for reason, count in outcomes.items() if reason != CUT)
    if not num_left:
        why = f"of {num_rows} rows were dropped {dropped}" if num_rows else "it has no rows"
        raise DataError(f"{section}.path: {settings.path} gives no example: {why}")
    if dropped:
        log.warning("%s: of %d rows were dropped %s", settings.path, num_rows, dropped)
    if outcomes[CUT]:
        log.warning(
            "%s: %d of %d rows are longer than %s.max_tokens %d (%s.too_long: %s)",
            *(settings.path, outcomes[CUT], num_rows, section, settings.max_tokens, section, settings.too_long),
        )
    log.debug("%s: %d examples from %d rows", settings.path, num_left, num_rows)
