"""Prompts from a data set: one `{"prompt": text}` or `{"messages": [...]}` a row, checked before a run starts.

Turns may stand under `prompt` too. `id` is optional (a text or a whole number, unique; else the row number); every
other key is metadata, handed as it is to the reward functions. Formats and blank lines are those of files.py: every bad
row is reported, none is mended. Rows are dropped only when `data.too_long` says so, and their number is logged.
"""

import logging
from pathlib import Path

from megarlhf.config.settings import Data
from megarlhf.data.files import Line, check_text, lines, read_each, type_name
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.errors import DataError
from megarlhf.records.prompts import Prompt

log = logging.getLogger(__name__)


def read_prompts(path: str | Path, tokenizer: Tokenizer, settings: Data) -> list[Prompt]:
    """Every usable prompt of the file at `path`, in file order; `row_id` is the row in the file, whatever is dropped.

    `metadata` holds the line's other keys, `id`, and `messages` for a chat. Raises DataError for a file or rows that
    cannot be used, and when no prompt is left.
    """
    first_place_of_id: dict[str, str] = {}
    num_cut = 0

    def read(line: Line) -> Prompt | None:
        nonlocal num_cut
        prompt = _prompt(line, tokenizer)
        _check_id(prompt, line.place, first_place_of_id)
        if len(prompt.token_ids) <= settings.max_prompt_tokens:
            return prompt
        num_cut += 1
        return _shorten(prompt, tokenizer, settings)

    rows = read_each(lines(str(path), "data.prompts", settings.split), read, settings)
    prompts = [prompt for prompt in rows if prompt is not None]
    _report(Path(path), settings, len(rows), num_cut, len(prompts))
    return prompts


def _prompt(line: Line, tokenizer: Tokenizer) -> Prompt:
    row = line.values()
    given = [key for key in ("prompt", "messages") if key in row]
    if len(given) != 1:
        found = "both prompt and messages" if given else f"neither prompt nor messages (its keys are {sorted(row)})"
        raise DataError(f"the row has {found}; give exactly one of the two")
    prompt = row[given[0]]
    _check_prompt(given[0], prompt)
    metadata = {"id": line.row, **{key: value for key, value in row.items() if key != "prompt"}}
    if isinstance(prompt, list):
        metadata["messages"] = prompt
    token_ids = tuple(tokenizer.encode_prompt(prompt))
    if not token_ids:
        raise DataError("the prompt is empty once it is tokenized; give at least one token")
    return Prompt(row_id=line.row, token_ids=token_ids, text=tokenizer.prompt_text(prompt), metadata=metadata)


def _check_prompt(key: str, prompt: object) -> None:
    accepted, wanted = ((str, list), "a text or a list of turns") if key == "prompt" else (list, "a list of turns")
    if not isinstance(prompt, accepted):
        raise DataError(f"{key} is {type_name(prompt)}; give {wanted}")
    if isinstance(prompt, str) and not prompt.strip():
        raise DataError("prompt is empty or blank; give a text")
    check_text(key, prompt)


def _check_id(prompt: Prompt, place: str, first_place_of_id: dict[str, str]) -> None:
    """Note the row's id; two prompts with one id would be merged by whoever groups by it."""
    row_id = prompt.metadata["id"]
    if isinstance(row_id, bool) or not isinstance(row_id, str | int):
        raise DataError(f"id is {type_name(row_id)}; give a text or a whole number")
    first = first_place_of_id.setdefault(str(row_id), place)
    if first != place:
        raise DataError(f"id {row_id!r} is already the id of {first}; ids must be unique")


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
    kept = cut(prompt.token_ids, limit, settings.too_long, tokenizer.bos_id)
    return Prompt(row_id=prompt.row_id, token_ids=kept, text=tokenizer.decode(kept), metadata=prompt.metadata)


def cut(token_ids: tuple[int, ...], limit: int, side: str, bos_id: int | None) -> tuple[int, ...]:
    """`limit` ids of the prompt: its start (truncate_right), or its end after the begin-of-sequence token, if any."""
    if side == "truncate_right":
        return token_ids[:limit]
    num_first = int(bos_id is not None and token_ids[0] == bos_id and limit > 1)
    return token_ids[:num_first] + token_ids[len(token_ids) - limit + num_first :]


def _report(path: Path, settings: Data, num_rows: int, num_cut: int, num_left: int) -> None:
    what = f"{num_cut} of {num_rows} prompts are longer than data.max_prompt_tokens {settings.max_prompt_tokens}"
    if num_left == 0:
        why = f"{what} and were dropped" if num_rows else "it has no rows"
        raise DataError(f"data.prompts: {path.absolute()} gives no prompt: {why}")
    if num_cut:
        log.warning("%s: %s (data.too_long: %s)", path, what, settings.too_long)
