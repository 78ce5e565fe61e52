"""The tiny tokenizer, and files written and read in one go."""

import json
from pathlib import Path

import pytest

from megarlhf.config.corpus import Corpus
from megarlhf.data import corpus
from megarlhf.data.tokenizer import Tokenizer
from tests import tiny


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer(tiny.write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def examples(tmp_path, tokenizer):
    """Write rows to a file and read it as `kind`: demonstrations, preferences, scored or labelled."""

    def write_and_read(kind, rows, **settings):
        path = write_rows(tmp_path / "corpus.jsonl", rows)
        return vars(corpus)[f"read_{kind}"](Corpus(path=str(path), **settings), tokenizer)

    return write_and_read


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
