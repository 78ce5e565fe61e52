"""Whatever bytes a file of prompts or examples holds, it is read or refused in our own words."""

import json
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarlhf.config.corpus import Corpus
from megarlhf.config.settings import Data
from megarlhf.data.corpus import read_demonstrations, read_labelled, read_preferences
from megarlhf.data.prompts import read_prompts
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.errors import MegarlhfError
from tests.tiny import write_llama

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner),
    max_leaves=8,
)
keys = st.sampled_from(["prompt", "messages", "response", "chosen", "rejected", "label", "text", "id", "system"])
rows = st.dictionaries(keys, values, max_size=4).map(json.dumps)
files = st.lists(rows | st.text(max_size=20), max_size=4).map(lambda lines: "\n".join(lines).encode("utf-8", "replace"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer(write_llama(tmp_path_factory.mktemp("model")))


@given(files | st.binary(max_size=60))
@settings(max_examples=40, deadline=None)
def test_any_file_is_read_or_refused(tmp_path_factory, tokenizer, content):
    path = tmp_path_factory.mktemp("fuzz") / "rows.jsonl"
    path.write_bytes(content)
    corpus = Corpus(path=str(path), max_tokens=64)
    readers = [
        partial(read_prompts, path, tokenizer, Data(prompts=str(path))),
        *(partial(read, corpus, tokenizer, "data") for read in (read_demonstrations, read_preferences, read_labelled)),
    ]
    for read in readers:
        try:
            assert read(), "an empty data set is an error"
        except MegarlhfError as error:
            assert str(path) in str(error) or "data" in str(error)
