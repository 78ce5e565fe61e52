"""Prompts, answers and conversations as token ids, such that learning sees the ids that sampling would see.

A prompt has the ids that it has for a rollout. A text answer has the ids that follow when prompt and answer are encoded
as one text; where those do not begin with the prompt's ids, the answer is encoded on its own. A chat is what its
template writes, id for id: an answer starts behind the header that a rollout starts from, and ends with its first stop
token, for there a rollout ends. What the template writes behind that (often a line end) is context, not answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megarlhf.data.examples import Answer
from megarlhf.data.files import check_text, type_name
from megarlhf.data.tokenizer import Message, Tokenizer, check_turns
from megarlhf.errors import DataError

Written = str | Sequence[Message]
"""A prompt or an answer as a file holds it: a text, or turns of a chat."""


@dataclass(frozen=True)
class Encoder:
    """Turns what a row says into ids. With `append_eos`, the end token follows where no stop token ends an answer."""

    tokenizer: Tokenizer
    append_eos: bool

    def prompt(self, prompt: Written) -> tuple[int, ...]:
        """Ids of a text or of turns that wait for an answer."""
        ids = tuple(self.tokenizer.encode_prompt(prompt))
        if not ids:
            raise DataError("the prompt is empty once it is tokenized; give at least one token")
        return ids

    def answer(self, prompt: Written, prompt_ids: tuple[int, ...], answer: str) -> Answer:
        """The text `answer` to `prompt`, which `self.prompt` encoded as `prompt_ids`."""
        if isinstance(prompt, str):
            return self.ended(self._text(prompt, prompt_ids, answer), answer)
        return self.ended(self._turn(prompt, prompt_ids, answer), answer)

    def conversation(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], Answer]:
        """Ids up to the assistant's first answer, and the rest, in which the assistant's tokens are marked as trained.

        Together they are the ids of `apply_chat_template`, and then the end token if the last answer has no stop token.
        """
        check_turns(messages)
        _check_order(messages)
        ids = self.tokenizer.encode_turns(messages, header=False)
        trained = [False] * len(ids)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                start, end = self._span(messages, number, ids)
                trained[start:end] = [True] * (end - start)
        if not any(trained):
            raise DataError("the assistant's turns are empty in the chat template; give answers with a content")
        first = trained.index(True)
        is_finished = ids[end - 1] in self.tokenizer.stop_ids
        if self.append_eos and not is_finished:
            ids, trained, is_finished = [*ids, self._eos_id()], [*trained, True], True
        answer = tuple(ids[first:])
        return tuple(ids[:first]), Answer(answer, self.decode(answer), is_finished, trained=tuple(trained[first:]))

    def ended(self, ids: Sequence[int], text: str) -> Answer:
        """An answer of these ids, and the end token where it is wanted and no stop token is there."""
        is_finished = bool(ids) and ids[-1] in self.tokenizer.stop_ids
        if is_finished or not self.append_eos:
            return Answer(tuple(ids), text, is_finished)
        return Answer((*ids, self._eos_id()), text, finished=True)

    def as_it_is(self, ids: Sequence[int]) -> Answer:
        """An answer of these ids and no more."""
        return Answer(tuple(ids), self.decode(ids), finished=ids[-1] in self.tokenizer.stop_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids."""
        return self.tokenizer.decode(ids)

    def _eos_id(self) -> int:
        if self.tokenizer.eos_id is None:
            raise DataError(
                f"the tokenizer in {self.tokenizer.folder} has no end token to append; set append_eos to false, or "
                "give the model folder an eos_token"
            )
        return self.tokenizer.eos_id

    def _text(self, prompt: str, prompt_ids: tuple[int, ...], answer: str) -> list[int]:
        together = self.tokenizer.encode_prompt(prompt + answer)
        num_prompt = len(prompt_ids)
        return together[num_prompt:] if _begins(together, prompt_ids) else self.tokenizer.encode_plain(answer)

    def _turn(self, prompt: Sequence[Message], prompt_ids: tuple[int, ...], answer: str) -> list[int]:
        messages: list[Message] = [*prompt, {"role": "assistant", "content": answer}]
        ids = self.tokenizer.encode_turns(messages, header=False)
        start, end = self._span(messages, len(prompt), ids)
        assert start == len(prompt_ids), "a chat's prompt ends with the header of the answer"
        return ids[start:end]

    def _span(self, messages: Sequence[Message], number: int, ids: list[int]) -> tuple[int, int]:
        """Where in `ids` (of all messages) the answer in turn `number` starts, behind its header, and where it ends."""
        header = self.tokenizer.encode_turns(messages[:number], header=True)
        if not _begins(ids, header):
            raise DataError(
                f"messages[{number}]: the chat template in {self.tokenizer.folder} does not write answers behind the "
                "header that it writes for generating (add_generation_prompt), so learning would not fit sampling; "
                "change the template, or give plain prompts and responses"
            )
        until = self.tokenizer.encode_turns(messages[: number + 1], header=False)
        is_written_alike = _begins(ids, until)
        limit = len(until) if is_written_alike else len(ids)
        stops = (at + 1 for at in range(len(header), limit) if ids[at] in self.tokenizer.stop_ids)
        end = next(stops, limit if is_written_alike else None)
        if end is None:
            raise DataError(
                f"messages[{number}]: the chat template in {self.tokenizer.folder} writes this answer differently once "
                "more turns follow, and no stop token shows where it ends; give stop tokens to the template"
            )
        return len(header), end


def shared_prompt(prompt: Written | None, answers: Sequence[Written]) -> tuple[Written, list[str]]:
    """The prompt of some answers, and each answer as text. If anything is written as turns, the prompt is a chat.

    An answer is a text, one turn of the assistant, or a whole conversation; whole conversations may differ in their
    last turn only, and what comes before it is the prompt, so `prompt` may be None then.
    """
    texts = [answer for answer in answers if isinstance(answer, str)]
    if isinstance(prompt, str) and len(texts) == len(answers):
        return prompt, texts
    texts, heads = [], []
    for answer in answers:
        head, text = _last_turn(answer)
        texts.append(text)
        heads += [head] if head and head not in heads else []
    if len(heads) > 1:
        raise DataError("the answers are conversations that differ before their last turn; give them the same prompt")
    if not heads:
        return _as_turns(prompt), texts
    _check_same_prompt(prompt, heads[0])
    return heads[0], texts


def check_written(name: str, value: object) -> None:
    """Raise DataError when `value` is neither a text nor a list of turns."""
    if not isinstance(value, str | list):
        raise DataError(f"{name} is {type_name(value)}; give a text or a list of turns")
    check_text(name, value)
    if isinstance(value, list):
        check_turns(value)


def _last_turn(answer: Written) -> tuple[list[Message], str]:
    """What comes before the last turn of an answer, and that turn's text."""
    if isinstance(answer, str):
        return [], answer
    last = answer[-1]
    if last["role"] != "assistant":
        raise DataError(f"an answer ends with a turn of the {last['role']}; it must end with the assistant's")
    return list(answer[:-1]), str(last["content"])


def _as_turns(prompt: Written | None) -> Sequence[Message]:
    if prompt is None:
        raise DataError("the row has no prompt, and its answers hold none; give prompt, or whole conversations")
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _check_same_prompt(prompt: Written | None, head: Sequence[Message]) -> None:
    if prompt is None or prompt == head:
        return
    if not isinstance(prompt, str) or prompt not in [turn["content"] for turn in head if turn["role"] == "user"]:
        raise DataError("prompt is not what the answers' conversations begin with; give the same, or leave it out")


def _check_order(messages: Sequence[Message]) -> None:
    first, last = messages[0]["role"], messages[-1]["role"]
    if first == "assistant":
        raise DataError("messages start with a turn of the assistant, which answers nothing; start with a user turn")
    if last != "assistant":
        raise DataError(f"messages end with a turn of the {last}; a conversation to learn from ends with an answer")


def _begins(ids: Sequence[int], start: Sequence[int]) -> bool:
    return list(ids[: len(start)]) == list(start)
