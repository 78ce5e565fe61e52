"""Prompt files: what is read, and what the person is told about every kind of file or line that cannot be."""

import json
import logging
import os
import sys

import pytest

from megarlhf.config.settings import Data
from megarlhf.data.files import MAX_REPORTED
from megarlhf.data.prompts import read_prompts
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.errors import DataError
from tests import tiny

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def read(tmp_path, tokenizer):
    """Write bytes, text or rows to a file and read it as prompts."""

    def write_and_read(content, **settings):
        path = tmp_path / "prompts.jsonl"
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_prompts(path, tokenizer, Data(**settings))

    return write_and_read


def test_a_row_becomes_ids_text_and_metadata(read, tokenizer):
    first, second = read([{"prompt": "abc", "id": "x", "answer": [1, 2]}, {"messages": CHAT, "level": 3}])
    assert (first.row_id, first.text, first.metadata) == (0, "abc", {"id": "x", "answer": [1, 2]})
    assert list(first.token_ids) == tokenizer.encode_prompt("abc")
    assert (second.row_id, second.text) == (1, "u>hi\na>")
    assert second.metadata == {"id": 1, "messages": CHAT, "level": 3}
    assert list(second.token_ids) == tokenizer.encode_prompt(CHAT)


def test_turns_may_stand_under_prompt(read):
    """As TRL and verl write them."""
    assert read([{"prompt": CHAT, "level": 3}]) == read([{"messages": CHAT, "level": 3}])


def test_bom_crlf_and_blank_lines_change_nothing(read):
    clean = read('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert read(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b"}\r\n\n') == clean
    assert read('{"prompt": "a"}\n{"prompt": "b"}') == clean


def test_unicode_line_separators_do_not_end_a_line(read):
    text = "a\u2028b\x85c"
    assert [p.text for p in read(json.dumps({"prompt": text}, ensure_ascii=False))] == [text]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "a"', "not JSON"),
        ('{"prompt": "a",}', "not JSON"),
        ('{"prompt": "a", "id": 1, "prompt": "b"}', r"key 'prompt' is given twice; keep one of them"),
        ('{"prompt": "a", "about": {"x": 1, "x": 1}}', "key 'x' is given twice"),
        ('"just text"', "the line is a text; give an object"),
        ('{"text": "a", "id": 3}', r"neither prompt nor messages \(its keys are \['id', 'text'\]\)"),
        ('{"prompt": "a", "messages": []}', "both prompt and messages"),
        ('{"prompt": 3}', "prompt is a number; give a text or a list of turns"),
        ('{"prompt": null}', "prompt is null"),
        ('{"prompt": ["a"]}', r"messages\[0\] is a text"),
        ('{"prompt": []}', "messages is empty"),
        ('{"prompt": {"a": 1}}', "prompt is an object"),
        ('{"prompt": ""}', "empty or blank"),
        ('{"prompt": " \\n\\t"}', "empty or blank"),
        ('{"messages": "hi"}', "messages is a text; give a list of turns"),
        ('{"messages": []}', "messages is empty"),
        ('{"messages": [{"role": "bard", "content": "x"}]}', "role is 'bard'"),
        ('{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}', "end with a turn"),
        ('{"prompt": "a", "id": null}', "id is null"),
        ('{"prompt": "a", "id": true}', "id is a boolean"),
        ('{"prompt": "a", "id": "first"}', "id 'first' is already the id of .*prompts.jsonl:1"),
        ('{"prompt": "a\\ud800b"}', r"half of a surrogate pair \(U\+D800\)"),
        ('{"messages": [{"role": "user", "content": "\\udc00"}]}', r"half of a surrogate pair \(U\+DC00\)"),
    ],
)
def test_a_bad_line_is_an_error_with_file_and_line(read, line, complaint):
    with pytest.raises(DataError, match=rf"prompts\.jsonl:3: .*{complaint}"):
        read('{"prompt": "ok", "id": "first"}\n\n' + line + "\n")


def test_all_bad_lines_are_reported_at_once_up_to_a_limit(read):
    with pytest.raises(DataError) as caught:
        read([{f"prompt{number}": 1} for number in range(MAX_REPORTED + 7)] + [{"prompt": "fine"}])
    lines = str(caught.value).splitlines()
    assert len(lines) == MAX_REPORTED + 1
    assert lines[-1] == "... and 7 more bad lines"


def test_rows_with_the_same_fault_are_told_together(read):
    with pytest.raises(DataError) as caught:
        read([{"prompt": 1}] * 2 + [{"prompt": "fine"}, {"text": "a"}] + [{"prompt": 1}] * 7)
    first, second = str(caught.value).splitlines()
    assert "prompts.jsonl:1: prompt is a number" in first and "jsonl:4: the row has neither" in second
    places = [place.rpartition(":")[2] for place in first.partition("(the same in ")[2].split(", ")]
    assert places == ["2", "5", "6", "7", "8 and 3 more)"]


def test_bytes_that_are_not_utf8_are_reported_with_their_offset(read):
    with pytest.raises(DataError, match=r"prompts\.jsonl:2: byte 29 of the file is not UTF-8 \(0xff\)"):
        read(b'{"prompt": "a"}\n{"prompt": "b\xff"}\n')


@pytest.mark.parametrize(
    ("content", "kind"),
    [(b'[{"prompt": "a"}]', "JSON array"), (b"PAR1\x00\x01", "parquet"), (b"\x1f\x8b\x08", "gzip"), (b"PK\x03", "zip")],
)
def test_another_format_under_the_name_jsonl_is_recognised(read, content, kind):
    with pytest.raises(DataError, match=kind):
        read(content)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_an_error(read, content):
    with pytest.raises(DataError, match="gives no prompt: it has no rows"):
        read(content)


def test_missing_files_and_folders_are_named_in_full(tmp_path, tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"data.prompts: {tmp_path}/no.jsonl does not exist"):
        read_prompts("no.jsonl", tokenizer, Data())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=f"{tmp_path} is not a file"):
        read_prompts(tmp_path, tokenizer, Data())


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(tmp_path, tokenizer):
    path = tmp_path / "secret.jsonl"
    path.write_text('{"prompt": "a"}')
    path.chmod(0)
    with pytest.raises(DataError, match="secret.jsonl cannot be read: Permission denied"):
        read_prompts(path, tokenizer, Data())


def test_the_same_text_under_two_ids_stays_two_prompts(read):
    rows = read([{"prompt": "a", "id": 1}, {"prompt": "a", "id": 2}])
    assert [row.metadata["id"] for row in rows] == [1, 2]


def test_a_number_and_a_text_that_look_alike_are_one_id(read):
    with pytest.raises(DataError, match="already the id of .*prompts.jsonl:1"):
        read([{"prompt": "a", "id": 1}, {"prompt": "b", "id": "1"}])


def test_special_token_text_in_metadata_is_plain_text(read):
    (row,) = read([{"prompt": "a", "answer": tiny.EOS}])
    assert row.metadata["answer"] == tiny.EOS


def test_nul_and_a_line_of_a_megabyte_are_read(read):
    assert read([{"prompt": "a\x00b"}])[0].text == "a\x00b"
    (row,) = read([{"prompt": "x" * 2**20}], max_prompt_tokens=2**21)
    assert len(row.token_ids) == 2**20


def test_too_long_is_an_error_unless_said_otherwise(read):
    rows = [{"prompt": "abc"}, {"prompt": "abcdef"}]
    with pytest.raises(DataError, match=r":2: the prompt has 6 tokens, more than data.max_prompt_tokens 4.*too_long"):
        read(rows, max_prompt_tokens=4)
    assert len(read(rows, max_prompt_tokens=6)) == 2


def test_dropped_rows_are_counted_and_row_ids_stay(read, caplog):
    rows = [{"prompt": "abcdef"}, {"prompt": "abc"}, {"prompt": "abcde"}]
    with caplog.at_level(logging.WARNING):
        (left,) = read(rows, max_prompt_tokens=4, too_long="drop")
    assert (left.row_id, left.metadata["id"]) == (1, 1)
    assert "2 of 3 prompts are longer than data.max_prompt_tokens 4" in caplog.text


def test_nothing_left_after_dropping_is_an_error_with_the_count(read):
    with pytest.raises(DataError, match="gives no prompt: 2 of 2 prompts are longer than .* and were dropped"):
        read([{"prompt": "abcdef"}, {"prompt": "abcde"}], max_prompt_tokens=4, too_long="drop")


@pytest.mark.parametrize(("side", "text"), [("truncate_left", "cdef"), ("truncate_right", "abcd")])
def test_a_cut_prompt_keeps_one_end_and_its_text_says_so(read, tokenizer, side, text):
    (row,) = read([{"prompt": "abcdef"}], max_prompt_tokens=4, too_long=side)
    assert row.text == text
    assert list(row.token_ids) == tokenizer.encode_prompt(text)


def test_cutting_on_the_left_keeps_the_begin_token(tmp_path):
    tiny.write_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"bos_token": "<|extra0|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(tmp_path)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "<|extra0|>abcdef"}')
    (row,) = read_prompts(path, tokenizer, Data(max_prompt_tokens=4, too_long="truncate_left"))
    assert list(row.token_ids) == [tokenizer.bos_id, *tokenizer.encode_prompt("def")]


def test_a_chat_is_not_cut(read):
    with pytest.raises(DataError, match="would break its template"):
        read([{"messages": CHAT}], max_prompt_tokens=4, too_long="truncate_left")
