"""The tokenizer of a Hugging Face model folder: prompts to token ids and back, and which ids end a response.

One path turns text into ids for every command. A plain prompt gets exactly the special tokens that the tokenizer adds;
a chat gets exactly `apply_chat_template(tokenize=True)`: the template's own beginning-of-sequence token is not doubled.
Text that spells a special token becomes that token, as in transformers. Rollouts are never turned into text and back.
"""

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from megarlhf.data.files import type_name
from megarlhf.errors import CheckpointError, ConfigError, DataError

Message = dict[str, object]
"""One turn of a chat: `role`, `content` and whatever else the chat template reads."""


class Tokenizer:
    """Tokenizer of the model in `folder`; `stop_tokens` end a response too, besides the model's own end tokens.

    Raises CheckpointError when the folder holds no tokenizer that loads without running its code, and ConfigError, of
    the `setting` that they were given as, when a stop token is not one token.
    """

    def __init__(self, folder: str | Path, stop_tokens: Sequence[str] = (), *, setting: str = "rollout.stop_tokens"):
        self.folder = Path(folder)
        self._hf = _load(self.folder)
        self.vocab_size: int = len(self._hf)
        self.bos_id: int | None = self._hf.bos_token_id
        self.stop_ids: tuple[int, ...] = self._stop_ids(stop_tokens, setting)
        self.eos_id: int | None = (
            self._hf.eos_token_id if self._hf.eos_token_id is not None else min(self.stop_ids, default=None)
        )
        self.pad_id: int = next(i for i in (self._hf.pad_token_id, *self.stop_ids, 0) if i is not None)

    @property
    def fingerprint(self) -> str:
        """A hash of the vocabulary: equal for tokenizers that mean the same by every id."""
        vocabulary = sorted(self._hf.get_vocab().items())
        return blake2b(repr(vocabulary).encode(), digest_size=16).hexdigest()

    @property
    def has_chat_template(self) -> bool:
        """Whether it can read messages."""
        return bool(self._hf.chat_template)

    def encode_prompt(self, prompt: str | Sequence[Message]) -> list[int]:
        """Ids of a text, or of a chat with the header of the answer at its end. Raises DataError for a bad chat."""
        if isinstance(prompt, str):
            return self._hf(prompt).input_ids
        check_prompt(prompt)
        return self._render(prompt, tokenize=True, header=True)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text that goes on: without the special tokens that the tokenizer puts around whole texts."""
        return self._hf(text, add_special_tokens=False).input_ids

    def encode_turns(self, messages: Sequence[Message], *, header: bool) -> list[int]:
        """Ids of a chat as its template writes it, with the header of the assistant's next answer if asked for."""
        check_turns(messages)
        return self._render(messages, tokenize=True, header=header)

    def prompt_text(self, prompt: str | Sequence[Message]) -> str:
        """The text that `encode_prompt` encodes."""
        return prompt if isinstance(prompt, str) else self._render(prompt, tokenize=False, header=True)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids as they are: spaces are not tidied."""
        return self._hf.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def _render(self, messages: Sequence[Message], *, tokenize: bool, header: bool) -> Any:
        if not self._hf.chat_template:
            raise DataError(
                f"the tokenizer in {self.folder} has no chat template, so it cannot read messages; "
                "put the template in that folder as chat_template.jinja, or give plain prompts"
            )
        try:
            return self._hf.apply_chat_template(
                list(messages), add_generation_prompt=header, tokenize=tokenize, return_dict=False
            )
        except Exception as error:  # templates raise whatever jinja or their author chose
            raise DataError(f"the chat template in {self.folder} refuses these messages: {error}") from error

    def _stop_ids(self, stop_tokens: Sequence[str], setting: str) -> tuple[int, ...]:
        ids = _model_end_ids(self.folder)
        if self._hf.eos_token_id is not None:
            ids.append(self._hf.eos_token_id)
        for text in stop_tokens:
            pieces = self._hf(text, add_special_tokens=False).input_ids
            if len(pieces) != 1:
                raise ConfigError(
                    f"{setting}: {text!r} is {len(pieces)} tokens ({pieces}) in the tokenizer of "
                    f"{self.folder}; give texts that are one token, such as <|im_end|>"
                )
            ids += pieces
        return tuple(sorted(set(ids)))


ROLES = ("system", "developer", "user", "assistant", "tool")


def check_prompt(messages: Sequence[Message]) -> None:
    """Raise DataError for a chat that cannot be answered: one that does not end with a turn of the user or a tool."""
    check_turns(messages)
    if messages[-1]["role"] in ("assistant", "system", "developer"):
        raise DataError(
            f"messages end with a turn of the {messages[-1]['role']}; a prompt ends with a user or tool turn, "
            "because what follows is the answer of the assistant, whose header would come twice"
        )


def check_turns(messages: Sequence[Message]) -> None:
    """Raise DataError for a chat that templates would mangle without a word.

    Accepted: at most one system turn and only at the start, known roles, text contents.
    """
    if not messages:
        raise DataError("messages is empty; give at least one user turn")
    for number, message in enumerate(messages):
        _check_message(number, message)


def _check_message(number: int, message: Message) -> None:
    if not isinstance(message, dict):
        raise DataError(f"messages[{number}] is {type_name(message)}; give an object with role and content")
    missing = [key for key in ("role", "content") if key not in message]
    if missing:
        raise DataError(f"messages[{number}] has no {' and no '.join(missing)}; its keys are {sorted(message)}")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise DataError(f"messages[{number}].role is {role!r}; accepted: {', '.join(ROLES)}")
    if role in ("system", "developer") and number > 0:
        raise DataError(f"messages[{number}] is a {role} turn; only the first turn may be one")
    if not isinstance(content, str):
        raise DataError(f"messages[{number}].content is {type_name(content)}; give a text")


def _load(folder: Path):
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise CheckpointError(f"model folder {folder.absolute()} does not exist or is not a folder")
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise CheckpointError(
            f"{folder.absolute()} holds no tokenizer (tokenizer.json or tokenizer.model); "
            "copy the tokenizer files of the original model into it"
        )
    try:
        settings = {"add_bos_token": True} if _is_bare_llama(folder) else {}
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True, **settings)
    except Exception as error:  # transformers raises half a dozen kinds for a broken folder
        raise CheckpointError(f"the tokenizer in {folder.absolute()} cannot be loaded: {error}") from error


def _is_bare_llama(folder: Path) -> bool:
    """Whether this is a Llama sentencepiece model that does not say if texts begin with <s>.

    They do, by the model's definition and in transformers 4; transformers 5 leaves <s> out unless told.
    """
    if (folder / "tokenizer.json").exists() or not (folder / "tokenizer.model").exists():
        return False
    settings = _read_json(folder / "tokenizer_config.json")
    kind = settings.get("tokenizer_class") or _read_json(folder / "config.json").get("model_type", "")
    return "add_bos_token" not in settings and kind.lower().startswith(("llama", "mistral"))


def _model_end_ids(folder: Path) -> list[int]:
    """Ids that end a text by generation_config.json, else by config.json: what transformers' generate stops at."""
    for name in ("generation_config.json", "config.json"):
        end = _read_json(folder / name).get("eos_token_id")
        if end is not None:
            return list(end) if isinstance(end, list) else [end]
    return []


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise CheckpointError(f"{path.absolute()} is not JSON: {error}") from error
