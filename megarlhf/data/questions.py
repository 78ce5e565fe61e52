"""Questions about answers, in words and in token ids: which of two is better, what is wrong with one, and a better one.

A question quotes the prompt and the answers as text, so that any model can be asked about any other model's answers. A
tokenizer with a chat template gets it as a turn of the user, another as a text to be continued.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megarlhf.data.tokenizer import Message, Tokenizer
from megarlhf.errors import DataError
from megarlhf.records.prompts import Prompt

LETTERS = ("A", "B")

_COMPARISON = """Below are a prompt and two answers to it. Decide which answer keeps better to this principle:
{principle}

[Prompt]
{prompt}

[Answer A]
{a}

[Answer B]
{b}

[End of the answers]
Which answer keeps better to the principle? Reply with one letter, A or B, and nothing else."""

_CRITIQUE = """Below are a prompt and an answer to it. Say specifically where the answer falls short of this principle:
{principle}

[Prompt]
{prompt}

[Answer]
{answer}

[End of the answer]
Where does the answer fall short of the principle? Reply with the critique only."""

_REVISION = """Below are a prompt, an answer to it, and a critique of the answer by this principle:
{principle}

[Prompt]
{prompt}

[Answer]
{answer}

[Critique]
{critique}

[End of the critique]
Rewrite the answer so that it keeps to the principle and the critique no longer holds. Reply with the answer only."""


@dataclass(frozen=True)
class Choice:
    """A question whose answer is one of a few tokens."""

    context_ids: tuple[int, ...]
    """What the model has read when it chooses; never empty."""
    option_ids: tuple[int, ...]
    """The tokens among which it chooses, all different."""


def prompt_as_written(prompt: Prompt) -> str | list[Message]:
    """The prompt as its file holds it: a text, or the turns of a chat."""
    return prompt.metadata.get("messages", prompt.text)


def comparison(tokenizer: Tokenizer, prompt: Prompt, a: str, b: str, principle: str) -> Choice:
    """Is answer `a` (letter A) or `b` (letter B) better? Options are in the order of LETTERS."""
    question = _COMPARISON.format(principle=principle, prompt=_transcript(prompt), a=a, b=b)
    return _choice(tokenizer, question, "Answer:", LETTERS)


def critique_request(tokenizer: Tokenizer, prompt: Prompt, answer: str, principle: str) -> tuple[int, ...]:
    """Ids that a critique follows."""
    question = _CRITIQUE.format(principle=principle, prompt=_transcript(prompt), answer=answer)
    return _ask(tokenizer, question, "Critique:")


def revision_request(
    tokenizer: Tokenizer, prompt: Prompt, answer: str, principle: str, critique: str
) -> tuple[int, ...]:
    """Ids that a revised answer follows."""
    words = {"principle": principle, "prompt": _transcript(prompt), "answer": answer, "critique": critique}
    return _ask(tokenizer, _REVISION.format(**words), "Revision:")


def _transcript(prompt: Prompt) -> str:
    written = prompt_as_written(prompt)
    if isinstance(written, str):
        return written
    return "\n\n".join(f"{str(turn['role']).capitalize()}: {turn['content']}" for turn in written)


def _ask(tokenizer: Tokenizer, question: str, lead: str) -> tuple[int, ...]:
    """In a chat the turn says who speaks next; in a plain text `lead` does."""
    if tokenizer.has_chat_template:
        return tuple(tokenizer.encode_prompt([{"role": "user", "content": question}]))
    return tuple(tokenizer.encode_prompt(f"{question}\n\n{lead}"))


def _choice(tokenizer: Tokenizer, question: str, lead: str, options: Sequence[str]) -> Choice:
    """The options are encoded together with what is before them and compared: where they begin to differ, the choice
    is made. So it does not matter whether a vocabulary writes a letter alone or together with the blank before it.
    """
    written = [f"{lead} {option}" for option in options]
    if tokenizer.has_chat_template:
        header = tokenizer.encode_prompt([{"role": "user", "content": question}])
        encoded = [[*header, *tokenizer.encode_plain(text)] for text in written]
    else:
        encoded = [tokenizer.encode_prompt(f"{question}\n\n{text}") for text in written]
    common = next((at for at, ids in enumerate(zip(*encoded, strict=False)) if len(set(ids)) > 1), 0)
    option_ids = tuple(ids[common] for ids in encoded)
    if not common or len(set(option_ids)) < len(options):
        raise DataError(
            f"the tokenizer in {tokenizer.folder} does not tell the letters {' and '.join(options)} apart; "
            "use another judge"
        )
    return Choice(tuple(encoded[0][:common]), option_ids)
