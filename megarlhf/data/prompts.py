"""Prompts from a JSONL file: one `{"prompt": text}` or `{"messages": [...]}` a line, checked before a run starts.

`id` is optional (a text or a whole number, unique; the row number when absent); every other key is metadata, handed as
it is to the reward functions. Blank lines are skipped and do not count as rows; a UTF-8 byte-order mark and CRLF line
ends are accepted. Nothing else is mended: every bad line is an error that names file and line, and all are reported at
once. Rows are dropped only when `data.too_long` says so, and their number is logged.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megarlhf.config.settings import Data
from megarlhf.data.tokenizer import Tokenizer, type_name
from megarlhf.errors import DataError
from megarlhf.records.prompts import Prompt

log = logging.getLogger(__name__)

MAX_REPORTED = 20
"""Bad lines spelled out in one error; the rest are counted."""


@dataclass(frozen=True)
class _Line:
    """A line that holds a row: `number` counts lines from 1, `row` counts rows from 0."""

    number: int
    row: int
    text: str


def read_prompts(path: str | Path, tokenizer: Tokenizer, settings: Data) -> list[Prompt]:
    """Every usable prompt of the file at `path`, in file order; `row_id` is the row in the file, whatever is dropped.

    `metadata` holds the line's other keys, `id`, and `messages` for a chat. Raises DataError for a file or rows that
    cannot be used, and when no prompt is left.
    """
    path = Path(path)
    prompts, errors = [], []
    first_line_of_id: dict[str, int] = {}
    num_rows = num_cut = 0
    for line in _lines(path):
        num_rows += 1
        try:
            prompt = _prompt(line, tokenizer)
            _check_id(prompt, line.number, first_line_of_id)
            if len(prompt.token_ids) > settings.max_prompt_tokens:
                num_cut += 1
                prompt = _shorten(prompt, tokenizer, settings)
        except DataError as error:
            errors.append(f"{path}:{line.number}: {error}")
            continue
        if prompt is not None:
            prompts.append(prompt)
    _raise_all(errors)
    _report(path, settings, num_rows, num_cut, len(prompts))
    return prompts


def _lines(path: Path) -> Iterator[_Line]:
    content = _read(path)
    offset = row = 0
    for number, raw in enumerate(content.split(b"\n"), start=1):
        try:
            text = raw.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}:{number}: byte {offset + error.start} of the file is not UTF-8 ({raw[error.start]:#04x}); "
                "save the file as UTF-8"
            ) from error
        offset += len(raw) + 1
        if text:
            yield _Line(number, row, text)
            row += 1


def _read(path: Path) -> bytes:
    """The bytes of a JSONL file without a byte-order mark (a mark is replaced by blanks, so that offsets stay true)."""
    if not path.exists():
        raise DataError(f"data.prompts: {path.absolute()} does not exist")
    if not path.is_file():
        raise DataError(f"data.prompts: {path.absolute()} is not a file; give one JSONL file")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"data.prompts: {path.absolute()} cannot be read: {error.strerror}") from error
    for magic, kind in ((b"PAR1", "a parquet file"), (b"\x1f\x8b", "a gzip file"), (b"PK", "a zip file")):
        if content.startswith(magic):
            raise DataError(f"data.prompts: {path.absolute()} is {kind}; convert it to JSON lines")
    if content.startswith(b"\xef\xbb\xbf"):
        content = b"   " + content[3:]
    if content.lstrip().startswith(b"["):
        raise DataError(
            f"data.prompts: {path.absolute()} is a JSON array; write one object a line (jq -c '.[]' IN > OUT)"
        )
    return content


def _prompt(line: _Line, tokenizer: Tokenizer) -> Prompt:
    row = _parse(line.text)
    given = [key for key in ("prompt", "messages") if key in row]
    if len(given) != 1:
        found = "both prompt and messages" if given else f"neither prompt nor messages (its keys are {sorted(row)})"
        raise DataError(f"the row has {found}; give exactly one of the two")
    prompt = row[given[0]]
    _check_prompt(given[0], prompt)
    metadata = {"id": line.row, **{key: value for key, value in row.items() if key != "prompt"}}
    token_ids = tuple(tokenizer.encode_prompt(prompt))
    if not token_ids:
        raise DataError("the prompt is empty once it is tokenized; give at least one token")
    return Prompt(row_id=line.row, token_ids=token_ids, text=tokenizer.prompt_text(prompt), metadata=metadata)


def _parse(text: str) -> dict:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}; the line starts with {text[:60]!r}") from error
    if not isinstance(row, dict):
        raise DataError(f"the line is {type_name(row)}; give an object with prompt or messages")
    return row


def _check_prompt(key: str, prompt: object) -> None:
    expected = {"prompt": str, "messages": list}[key]
    if not isinstance(prompt, expected):
        wanted = {"prompt": "a text", "messages": "a list of turns"}[key]
        raise DataError(f"{key} is {type_name(prompt)}; give {wanted}")
    if key == "prompt" and not prompt.strip():
        raise DataError("prompt is empty or blank; give a text")
    try:
        json.dumps(prompt, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{key} holds half of a surrogate pair (U+{ord(error.object[error.start]):04X}), which is no character; "
            "write the whole character"
        ) from error


def _check_id(prompt: Prompt, number: int, first_line_of_id: dict[str, int]) -> None:
    """Note the row's id; two prompts with one id would be merged by whoever groups by it."""
    row_id = prompt.metadata["id"]
    if isinstance(row_id, bool) or not isinstance(row_id, str | int):
        raise DataError(f"id is {type_name(row_id)}; give a text or a whole number")
    first = first_line_of_id.setdefault(str(row_id), number)
    if first != number:
        raise DataError(f"id {row_id!r} is already the id of line {first}; ids must be unique")


def _shorten(prompt: Prompt, tokenizer: Tokenizer, settings: Data) -> Prompt | None:
    """What `data.too_long` makes of a prompt that is too long; None drops it."""
    limit, length = settings.max_prompt_tokens, len(prompt.token_ids)
    if settings.too_long == "drop":
        return None
    if settings.too_long == "error":
        raise DataError(
            f"the prompt has {length} tokens, more than data.max_prompt_tokens {limit}; "
            "raise it, or set data.too_long to drop, truncate_left or truncate_right"
        )
    if "messages" in prompt.metadata:
        raise DataError(
            f"the chat has {length} tokens, more than data.max_prompt_tokens {limit}, and cutting it (data.too_long "
            f"{settings.too_long}) would break its template; raise the limit or set data.too_long to drop"
        )
    kept = _cut(prompt.token_ids, limit, settings.too_long, tokenizer.bos_id)
    return Prompt(row_id=prompt.row_id, token_ids=kept, text=tokenizer.decode(kept), metadata=prompt.metadata)


def _cut(token_ids: tuple[int, ...], limit: int, side: str, bos_id: int | None) -> tuple[int, ...]:
    """`limit` ids of the prompt: its start (truncate_right), or its end after the begin-of-sequence token, if any."""
    if side == "truncate_right":
        return token_ids[:limit]
    num_first = int(bos_id is not None and token_ids[0] == bos_id and limit > 1)
    return token_ids[:num_first] + token_ids[len(token_ids) - limit + num_first :]


def _raise_all(errors: list[str]) -> None:
    if errors:
        more = [f"... and {len(errors) - MAX_REPORTED} more bad lines"] if len(errors) > MAX_REPORTED else []
        raise DataError("\n".join(errors[:MAX_REPORTED] + more))


def _report(path: Path, settings: Data, num_rows: int, num_cut: int, num_left: int) -> None:
    what = f"{num_cut} of {num_rows} prompts are longer than data.max_prompt_tokens {settings.max_prompt_tokens}"
    if num_left == 0:
        why = f"{what} and were dropped" if num_rows else "it has no rows"
        raise DataError(f"data.prompts: {path.absolute()} gives no prompt: {why}")
    if num_cut:
        log.warning("%s: %s (data.too_long: %s)", path, what, settings.too_long)
