"""Answers have the ids of a rollout; conversations those of apply_chat_template, with assistant turns marked."""

import json

import pytest
from transformers import AutoTokenizer

from megarlhf.data.encoding import Encoder, shared_prompt
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.errors import DataError
from tests import tiny

MARKED = (
    "{% for m in messages %}<|extra0|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|extra0|>assistant\n{% endif %}"
)
"""As ChatML, with the marks by which transformers itself tells the assistant's tokens."""
FORGETFUL = (
    "{% for m in messages %}<|extra0|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last else m['content'].split('#')[-1] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|extra0|>assistant\n{% endif %}"
)
"""Drops the thoughts (before #) of earlier turns."""


def turns(*contents: str, roles: str = "ua") -> list[dict]:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": names[roles[at % len(roles)]], "content": text} for at, text in enumerate(contents)]


@pytest.fixture
def encoder_of(tmp_path):
    """An encoder whose tokenizer has the given chat template."""

    def build(template: str, append_eos: bool = True) -> Encoder:
        tiny.write_tokenizer(tmp_path)
        file = tmp_path / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
        return Encoder(Tokenizer(tmp_path), append_eos)

    return build


def marked(prompt_ids, answer) -> list[int]:
    return [0] * len(prompt_ids) + [int(is_trained) for is_trained in answer.trained]


@pytest.mark.parametrize(
    "messages",
    [
        turns("hi", "yo"),
        turns("hi", "yo", "and?", "so"),
        turns("be brief", "hi", "yo", "x", "", roles="suaua"),
        turns("hi", "call", "42", "it is 42", roles="uata"),
    ],
)
def test_the_assistants_tokens_are_those_that_transformers_marks(encoder_of, messages):
    encoder = encoder_of(MARKED)
    prompt_ids, answer = encoder.conversation(messages)
    peer = AutoTokenizer.from_pretrained(encoder.tokenizer.folder).apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert [*prompt_ids, *answer.token_ids] == peer["input_ids"]
    assert marked(prompt_ids, answer) == peer["assistant_masks"]
    assert list(prompt_ids) == encoder.tokenizer.encode_prompt(
        messages[: [m["role"] for m in messages].index("assistant")]
    )


def test_a_template_without_stop_tokens_gets_the_end_token_after_the_last_answer(encoder_of):
    prompt_ids, answer = encoder_of(tiny.CHAT_TEMPLATE).conversation(turns("hi", "yo", "and?", "so"))
    as_rendered = encoder_of(tiny.CHAT_TEMPLATE, append_eos=False)
    without_end = as_rendered.conversation(turns("hi", "yo", "and?", "so"))[1]
    assert answer.token_ids == (*without_end.token_ids, 0) and answer.finished and not without_end.finished
    text = "".join(as_rendered.decode([i]) for i, yes in zip(answer.token_ids, answer.trained, strict=True) if yes)
    assert text == "yo\nso\n"


def test_answers_that_a_template_shortens_later_are_trained_as_they_are_written(encoder_of):
    encoder = encoder_of(FORGETFUL)
    _, answer = encoder.conversation(turns("hi", "hm#yo", "and?", "ah#so"))
    trained = [i for i, yes in zip(answer.token_ids, answer.trained, strict=True) if yes]
    assert encoder.decode(trained) == "yoah#so" and trained.count(0) == 2


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (tiny.CHAT_TEMPLATE.replace("'a>'", "'a> '"), r"messages\[1\]: .* does not write answers behind the header"),
        (FORGETFUL.replace("<|end|>", ""), r"messages\[1\]: .* differently once more turns follow"),
    ],
)
def test_templates_that_hide_where_an_answer_is_are_refused(encoder_of, template, complaint):
    with pytest.raises(DataError, match=complaint):
        encoder_of(template).conversation(turns("hi", "hm#yo", "and?", "so"))


def test_an_answer_follows_the_prompt_of_a_rollout(encoder_of):
    encoder = encoder_of(MARKED)
    for prompt, end in (("hi", [0]), (turns("hi"), [0])):
        ids = encoder.prompt(prompt)
        assert list(ids) == encoder.tokenizer.encode_prompt(prompt)
        answer = encoder.answer(prompt, ids, "yo")
        assert list(answer.token_ids) == encoder.tokenizer.encode_plain("yo") + end and answer.finished


def test_text_that_joins_with_the_prompt_is_encoded_on_its_own(tmp_path):
    tiny.write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    settings = json.loads(file.read_text())
    settings["added_tokens"].append(settings["added_tokens"][-1] | {"content": "bc", "special": False})
    settings["model"]["vocab"]["bc"] = settings["model"]["vocab"].pop(settings["added_tokens"][-2]["content"])
    del settings["added_tokens"][-2]
    file.write_text(json.dumps(settings))
    encoder = Encoder(Tokenizer(tmp_path), append_eos=False)
    assert len(encoder.tokenizer.encode_prompt("abcd")) == 3
    ids = encoder.prompt("ab")
    assert len(ids) == 2 and encoder.decode(encoder.answer("ab", ids, "cd").token_ids) == "cd"


ANSWER = [{"role": "assistant", "content": "yo"}]
CHAT = turns("q", "a", "hi")


@pytest.mark.parametrize(
    ("prompt", "answers", "expected"),
    [
        ("hi", ["yo", "no"], ("hi", ["yo", "no"])),
        (CHAT, ["yo", ANSWER], (CHAT, ["yo", "yo"])),
        ("hi", [ANSWER, "no"], (turns("hi"), ["yo", "no"])),
        (None, [CHAT + ANSWER, CHAT + turns("no", roles="a")], (CHAT, ["yo", "no"])),
        ("hi", [CHAT + ANSWER, "no"], (CHAT, ["yo", "no"])),
        (CHAT, [CHAT + ANSWER, ANSWER], (CHAT, ["yo", "yo"])),
    ],
)
def test_texts_and_turns_may_be_mixed(prompt, answers, expected):
    assert shared_prompt(prompt, answers) == expected


@pytest.mark.parametrize(
    ("prompt", "answers", "complaint"),
    [
        (None, ["yo", "no"], "has no prompt"),
        (None, [CHAT + ANSWER, turns("x") + ANSWER], "differ before their last turn"),
        ("other", [CHAT + ANSWER], "not what the answers' conversations begin with"),
        ("hi", [turns("hi")], "ends with a turn of the user"),
    ],
)
def test_answers_to_different_prompts_are_refused(prompt, answers, complaint):
    with pytest.raises(DataError, match=complaint):
        shared_prompt(prompt, answers)
