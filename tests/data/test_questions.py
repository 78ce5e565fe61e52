"""A question is read as it would be sampled from, and its choice is where the options begin to differ."""

import json

import pytest

from megarlhf.data.questions import comparison, critique_request, prompt_as_written, revision_request
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.errors import DataError
from megarlhf.records.prompts import Prompt
from tests.tiny import write_tokenizer

TURNS = [
    {"role": "user", "content": "Hi {x}"},
    {"role": "assistant", "content": "Yes?"},
    *[{"role": "user", "content": "z"}],
]
PLAIN = Prompt(0, (5,), "Once upon {y}", {"id": 0})
CHAT = Prompt(1, (5,), "u>...", {"id": 1, "messages": TURNS})


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("questions") / "chat"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = write_tokenizer(tmp_path_factory.mktemp("questions") / "plain")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer(folder)


def test_a_chat_model_is_asked_in_a_turn_and_begins_its_answer(chat):
    choice = comparison(chat, PLAIN, "one", "two", "Be kind.")
    text = chat.decode(choice.context_ids)
    assert text.startswith("u>Below are") and text.endswith("nothing else.\na>Answer: ")
    assert "[Prompt]\nOnce upon {y}\n\n[Answer A]\none\n\n[Answer B]\ntwo\n\n" in text and "\nBe kind.\n" in text
    assert [chat.decode([option]) for option in choice.option_ids] == ["A", "B"]


def test_a_plain_model_is_given_a_text_to_continue(plain):
    text = plain.decode(comparison(plain, CHAT, "one", "two", "Be kind.").context_ids)
    assert text.startswith("Below are") and text.endswith("nothing else.\n\nAnswer: ")
    assert "[Prompt]\nUser: Hi {x}\n\nAssistant: Yes?\n\nUser: z\n\n[Answer A]" in text
    assert plain.decode(critique_request(plain, CHAT, "one", "p")).endswith("\n\nCritique:")
    assert plain.decode(revision_request(plain, CHAT, "one", "p", "bad")).endswith("\n\nRevision:")


def test_a_critique_and_a_revision_quote_all_that_they_are_about(chat):
    assert "\np\n\n[Prompt]\nOnce upon {y}\n\n[Answer]\none\n\n" in chat.decode(
        critique_request(chat, PLAIN, "one", "p")
    )
    asked = chat.decode(revision_request(chat, PLAIN, "one", "p", "too {short}"))
    assert "\np\n\n[Prompt]\nOnce upon {y}\n\n[Answer]\none\n\n[Critique]\ntoo {short}\n\n" in asked
    assert asked.endswith("only.\na>")


def test_prompts_are_written_as_they_were_read():
    assert prompt_as_written(PLAIN) == "Once upon {y}" and prompt_as_written(CHAT) == TURNS


def vocabulary(folder, tokens: list[str], split: str) -> Tokenizer:
    """A tokenizer of these tokens, which are found in a text by the pattern `split`."""
    folder = write_tokenizer(folder)
    whole = json.loads((folder / "tokenizer.json").read_text())
    known = whole["model"]["vocab"]
    whole["model"]["vocab"] = known | {token: len(known) + at for at, token in enumerate(tokens)}
    whole["pre_tokenizer"]["pattern"]["Regex"] = split
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    return Tokenizer(folder)


def test_a_letter_may_be_one_token_with_the_blank_before_it(tmp_path):
    tokenizer = vocabulary(tmp_path / "blanks", [" A", " B"], r" [AB]|[\s\S]")
    choice = comparison(tokenizer, PLAIN, "one", "two", "p")
    assert [tokenizer.decode([option]) for option in choice.option_ids] == [" A", " B"]
    assert tokenizer.decode(choice.context_ids).endswith("\na>Answer:")


def test_a_tokenizer_that_cannot_tell_the_letters_apart_is_refused(tmp_path):
    tokenizer = vocabulary(tmp_path / "unknown", [], r" [AB]|[\s\S]")
    with pytest.raises(DataError, match="does not tell the letters A and B apart"):
        comparison(tokenizer, PLAIN, "one", "two", "p")
