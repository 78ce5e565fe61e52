"""Checking a maths answer: find the final answer in a response, and see whether it means the same as the right one.

Answers are read by a small parser of our own (expressions.py): nothing is evaluated as code, sizes are bounded, and
rational numbers are compared exactly.
"""

import re
from collections.abc import Sequence

from megarlhf.errors import RewardError
from megarlhf.rewards.expressions import NotAnExpression, equal, parse

MAX_ANSWER_CHARACTERS = 400
"""A longer answer is compared as text only."""
MAX_BOXES, MAX_BOXED_CHARACTERS = 8, 2000
"""Boxes looked at, from the last, and how far their closing brace is looked for."""

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_SAID = re.compile(r"(?:final\s+)?answer\s*(?:is|=|:)\s*(?::\s*)?(.+)", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d)(?:/\d+)?)%?")
_PLAIN_MIXED = re.compile(r"(?<![\w./^}])(\d+) (\d+)/(\d+)(?![\d.])")
_DROPPED = re.compile(
    r"\\(?:left|right|displaystyle|mathrm|mathbf|text|textbf|mbox|operatorname)\b|\\[!,;: ]|\^\{?\\circ\}?|\\circ\b"
    r"|\\?[$%]|[£€°]"
)


def maths(prompts: Sequence[str], responses: Sequence[str], metadata: Sequence[dict]) -> list[float]:
    """1 where the response's final answer means the same as the row's `answer` (a text or a number), else 0.

    The final answer is what the last \\boxed{...} holds, else what follows the last ####, else what follows the last
    "answer is", else the last number. Raises RewardError for a row without an `answer`.
    """
    answers = [_right_answer(row) for row in metadata]
    return [float(is_right(response, answer)) for response, answer in zip(responses, answers, strict=True)]


def is_right(response: str, answer: str) -> bool:
    """Whether the final answer of `response` equals `answer`, which may itself be boxed or follow ####."""
    found = final_answer(response)
    wanted = _marked_answer(answer) or answer
    return found is not None and same_answer(found, wanted)


def final_answer(response: str) -> str | None:
    """The final answer in a response, as written; None when there is none."""
    marked = _marked_answer(response)
    if marked is not None:
        return marked
    said = _SAID.findall(response)
    if said:
        numbers = _numbers(said[-1])
        text = said[-1].strip().rstrip(".").strip()
        return text if not numbers or _reads_as_expression(text) else numbers[0]
    numbers = _numbers(response)
    return numbers[-1] if numbers else None


def same_answer(found: str, wanted: str) -> bool:
    """Whether two answers mean the same: equal texts once tidied, or expressions (lists of them) of equal value.

    Currency, percent and degree signs, thousands commas and `x =` in front are no part of an answer. The order of
    a list's items matters, and so do its brackets: [1, 2) is not (1, 2).
    """
    left, right = _tidy(found), _tidy(wanted)
    if left == right:
        return left != ""
    if max(len(left), len(right)) > MAX_ANSWER_CHARACTERS:
        return False
    ours, theirs = _items(left), _items(right)
    if ours[0] != theirs[0] or len(ours[1]) != len(theirs[1]):
        return False
    return all(_same_item(a, b) for a, b in zip(ours[1], theirs[1], strict=True))


def _right_answer(row: dict) -> str:
    answer = row.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise RewardError(
            f"the reward function maths needs a text or a number under 'answer' in every line of data.prompts; row "
            f"{row.get('id')!r} has the keys {sorted(row)}"
        )
    return str(answer)


def _marked_answer(text: str) -> str | None:
    """What the last \\boxed{...} holds, else the rest of the line after the last ####."""
    for match in list(_BOXED.finditer(text))[: -MAX_BOXES - 1 : -1]:
        content = _braced(text, match.end())
        if content is not None:
            return content
    _, mark, rest = text.rpartition("####")
    return rest.strip().splitlines()[0] if mark and rest.strip() else None


def _braced(text: str, start: int) -> str | None:
    """What stands between the brace at `start` and the one that closes it; None when none does."""
    depth = 0
    for index in range(start, min(len(text), start + MAX_BOXED_CHARACTERS)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start + 1 : index]
    return None


def _numbers(text: str) -> list[str]:
    return [match for match in _NUMBER.findall(text) if any(character.isdigit() for character in match)]


def _reads_as_expression(text: str) -> bool:
    try:
        parse(_tidy(text))
    except NotAnExpression:
        return False
    return True


def _tidy(answer: str) -> str:
    """Without what is no part of the answer: dollar signs, spacing commands, units' signs, thousands commas, `x =`."""
    text = _DROPPED.sub("", answer.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("−", "-"))
    text = re.sub(r"(?<=\d)(?:,|\{,\}| )(?=\d{3}(?![\d/]))", "", text)
    text = _PLAIN_MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"^\s*[a-zA-Z]\s*(?:=|\\in\b)\s*", "", text.strip())
    return re.sub(r"\s+", " ", text).strip().rstrip(".").strip()


def _items(text: str) -> tuple[str, list[str]]:
    """(brackets, items): those of a bracketed list, or no brackets and the text's top-level comma parts."""
    text = text.replace("\\{", "{").replace("\\}", "}")
    parts = _split(text)
    if len(parts) == 1 and len(text) > 1 and text[0] + text[-1] in ("()", "[]", "(]", "[)", "{}"):
        inner = _split(text[1:-1])
        if len(inner) > 1:
            return text[0] + text[-1], inner
    return "", parts


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _same_item(left: str, right: str) -> bool:
    """By value where both have one, or else by their letters; digits are only told apart by braces and blanks."""
    letters = [re.sub(r"[{}\\]|(?<!\d)\s|\s(?!\d)", "", text).lower() for text in (left, right)]
    is_spelled_alike = letters[0] == letters[1] != ""
    if is_spelled_alike and not any(map(str.isdigit, letters[0])):
        return True
    try:
        return equal(parse(left), parse(right))
    except NotAnExpression:
        return is_spelled_alike
