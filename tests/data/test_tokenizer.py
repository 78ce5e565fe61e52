"""The tokenizer agrees with transformers and sentencepiece, and puts the beginning-of-sequence token exactly once."""

import json
import pathlib

import pytest
import sentencepiece
from transformers import AutoTokenizer

from megarlhf.data.tokenizer import Tokenizer
from megarlhf.errors import CheckpointError, ConfigError, DataError
from tests import tiny

BOS_TEMPLATE = "{{ bos_token }}" + tiny.CHAT_TEMPLATE


def folder_with_bos(folder: pathlib.Path, template: str) -> pathlib.Path:
    """The tiny tokenizer, but with a post-processor that begins every text with <|pad|> (id 1) as its BOS."""
    tiny.write_tokenizer(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    begin, text = {"SpecialToken": {"id": tiny.PAD, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text],
        "special_tokens": {tiny.PAD: {"id": tiny.PAD, "ids": [1], "tokens": [tiny.PAD]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"bos_token": tiny.PAD, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory) -> pathlib.Path:
    return tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi there"}]


@pytest.mark.parametrize(("template", "num_begin"), [(BOS_TEMPLATE, 1), (tiny.CHAT_TEMPLATE, 0)])
def test_a_chat_has_the_begin_token_of_its_template_and_no_other(tmp_path, template, num_begin):
    folder = folder_with_bos(tmp_path, template)
    ids = Tokenizer(folder).encode_prompt(CHAT)
    assert ids.count(1) == num_begin
    assert (ids[0] == 1) == bool(num_begin)
    peer = AutoTokenizer.from_pretrained(folder)
    assert ids == peer.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=True, return_dict=False)


def test_a_plain_prompt_has_exactly_what_the_tokenizer_adds(tmp_path, plain_folder):
    with_begin = Tokenizer(folder_with_bos(tmp_path, BOS_TEMPLATE)).encode_prompt("hi there")
    without = Tokenizer(plain_folder).encode_prompt("hi there")
    assert with_begin == [1, *without]
    assert len(without) == len("hi there")


def test_a_chat_and_its_rendered_text_have_the_same_ids(plain_folder):
    tokenizer = Tokenizer(plain_folder)
    text = tokenizer.prompt_text(CHAT)
    assert text == "s>be brief\nu>hi there\na>"
    assert tokenizer.encode_prompt(text) == tokenizer.encode_prompt(CHAT)
    assert tokenizer.decode(tokenizer.encode_prompt(CHAT)) == text


def test_decoding_leaves_special_tokens_out_unless_asked(plain_folder):
    tokenizer = Tokenizer(plain_folder)
    ids = tokenizer.encode_prompt("a , b") + [0]
    assert tokenizer.decode(ids) == "a , b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a , b" + tiny.EOS


def test_stop_ids_are_the_models_the_tokenizers_and_the_asked_for(tmp_path):
    tiny.write_tokenizer(tmp_path)
    assert Tokenizer(tmp_path).stop_ids == (0,)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 7}')
    assert Tokenizer(tmp_path).stop_ids == (0, 7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
    assert Tokenizer(tmp_path).stop_ids == (0, 5)
    newline = Tokenizer(tmp_path).encode_prompt("\n")
    assert Tokenizer(tmp_path, stop_tokens=["\n"]).stop_ids == tuple(sorted({0, 5, *newline}))


def test_a_stop_token_of_several_tokens_is_refused(plain_folder):
    with pytest.raises(ConfigError, match=r"rollout.stop_tokens: 'ab' is 2 tokens"):
        Tokenizer(plain_folder, stop_tokens=["ab"])


def test_a_fingerprint_tells_what_the_ids_mean(tmp_path, plain_folder):
    other_template = folder_with_bos(tmp_path / "a", BOS_TEMPLATE)
    assert Tokenizer(other_template).fingerprint == Tokenizer(plain_folder).fingerprint
    more_tokens = tiny.write_tokenizer(tmp_path / "b", vocab_size=tiny.VOCAB + 1)
    assert Tokenizer(more_tokens).fingerprint != Tokenizer(plain_folder).fingerprint


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "messages is empty"),
        ([{"role": "wizard", "content": "hi"}], r"messages\[0\].role is 'wizard'; accepted: system"),
        ([CHAT[0], CHAT[0], CHAT[1]], r"messages\[1\] is a system turn; only the first"),
        ([CHAT[1], {"role": "assistant", "content": "yes"}], "end with a turn of the assistant"),
        ([{"role": "user", "content": None}], r"messages\[0\].content is null"),
        ([{"role": "user"}], r"messages\[0\] has no content; its keys are \['role'\]"),
        (["hi"], r"messages\[0\] is a text"),
    ],
)
def test_a_bad_chat_is_refused_in_words(plain_folder, messages, complaint):
    with pytest.raises(DataError, match=complaint):
        Tokenizer(plain_folder).encode_prompt(messages)


def test_what_a_template_raises_is_reported(tmp_path):
    folder = folder_with_bos(tmp_path, "{{ raise_exception('only one user turn, please') }}")
    with pytest.raises(DataError, match="refuses these messages: only one user turn, please"):
        Tokenizer(folder).encode_prompt(CHAT)


def test_messages_without_a_chat_template_say_where_to_put_one(tmp_path):
    tiny.write_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match="no chat template.*chat_template.jinja"):
        Tokenizer(tmp_path).encode_prompt(CHAT)


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=f"{tmp_path} holds no tokenizer"):
        Tokenizer(tmp_path)
    tiny.write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="generation_config.json is not JSON"):
        Tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        Tokenizer(tmp_path / "nowhere")


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory) -> pathlib.Path:
    """A folder with only a config.json and a sentencepiece `tokenizer.model`, trained on this file."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    with open(folder / "tokenizer.model", "wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(pathlib.Path(__file__).read_text().splitlines()),
            model_writer=model,
            model_type="bpe",
            vocab_size=380,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.mark.parametrize("settings", [{}, {"tokenizer_class": "LlamaTokenizer"}])
def test_a_llama_sentencepiece_model_begins_texts_with_one_begin_token(sentencepiece_folder, tmp_path, settings):
    for name in ("tokenizer.model", "config.json"):
        (tmp_path / name).write_bytes((sentencepiece_folder / name).read_bytes())
    if settings:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(tmp_path)
    peer = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in ("a chat has the begin token", "two  spaces, é and 漢字", "1234"):
        assert tokenizer.encode_prompt(text) == [peer.bos_id(), *peer.encode(text)]
        assert tokenizer.decode(tokenizer.encode_prompt(text)) == text
    assert tokenizer.stop_ids == (peer.eos_id(),)
    assert tokenizer.vocab_size == peer.get_piece_size()


def test_a_sentencepiece_model_that_says_no_begin_token_gets_none(sentencepiece_folder, tmp_path):
    for name in ("tokenizer.model", "config.json"):
        (tmp_path / name).write_bytes((sentencepiece_folder / name).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "add_bos_token": false}')
    peer = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert Tokenizer(tmp_path).encode_prompt("hi there") == peer.encode("hi there")
