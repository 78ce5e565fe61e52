"""The same rows come out of JSONL, Parquet and a saved data set; without the packages the person is told what to do."""

import sys

import pytest

from megarlhf.config.corpus import Corpus
from megarlhf.config.settings import Data
from megarlhf.data.corpus import read_preferences
from megarlhf.data.files import HUB, lines
from megarlhf.data.prompts import read_prompts
from megarlhf.errors import DataError
from tests.data.conftest import write_rows

ROWS = [
    {"prompt": [{"role": "user", "content": "hi"}], "chosen": "yo", "rejected": "no", "margin": 0.5},
    {"prompt": [{"role": "user", "content": "you"}], "chosen": "a", "rejected": "b"},
]


def values(path, split: str = "train") -> list[dict]:
    return [line.values() for line in lines(str(path), "data.path", split)]


def test_parquet_rows_are_those_of_jsonl(tmp_path, tokenizer):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "pairs.parquet", row_group_size=1)
    assert values(tmp_path / "pairs.parquet") == ROWS
    jsonl = write_rows(tmp_path / "pairs.jsonl", ROWS)
    read = [read_preferences(Corpus(path=str(path)), tokenizer) for path in (jsonl, tmp_path / "pairs.parquet")]
    assert read[0] == read[1]


def test_a_bad_parquet_row_is_named(tmp_path, tokenizer):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": "a"}, {"prompt": None, "level": 1}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    with pytest.raises(DataError, match=r"prompts.parquet: row 1: .*neither prompt nor messages"):
        read_prompts(tmp_path / "prompts.parquet", tokenizer, Data())


def test_a_broken_parquet_file_is_an_error(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "x.parquet").write_text("{}")
    with pytest.raises(DataError, match="data.path: .*x.parquet cannot be read as Parquet"):
        values(tmp_path / "x.parquet")


@pytest.fixture
def data_set_folder(tmp_path, monkeypatch):
    """A folder with ROWS as train.jsonl, and the package that reads it."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "folder").mkdir()
    write_rows(tmp_path / "folder" / "train.jsonl", ROWS)
    return tmp_path / "folder", datasets


def test_a_folder_of_files_is_a_data_set(data_set_folder, tmp_path):
    assert values(data_set_folder[0]) == ROWS
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty cannot be read as a data set"):
        values(tmp_path / "empty")


def test_a_saved_data_set_gives_its_rows(data_set_folder, tmp_path):
    folder, datasets = data_set_folder
    rows = datasets.load_dataset(str(folder), split="train")
    rows.save_to_disk(tmp_path / "one")
    assert values(tmp_path / "one") == ROWS
    datasets.DatasetDict({"test": rows.select([1])}).save_to_disk(tmp_path / "several")
    assert values(tmp_path / "several", "test") == ROWS[1:]
    with pytest.raises(DataError, match=r"several has no split 'train'; its splits are \['test'\]"):
        values(tmp_path / "several")


@pytest.mark.parametrize(
    ("name", "package", "remedy"),
    [
        ("x.parquet", "pyarrow", "pip install pyarrow, or convert the file to JSON lines"),
        (".", "datasets", "pip install datasets, or give one JSONL or Parquet file"),
    ],
)
def test_a_missing_package_is_named_with_the_way_round_it(tmp_path, monkeypatch, name, package, remedy):
    (tmp_path / "x.parquet").touch()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=f"data.path: .*{package}.*{remedy}"):
        values(tmp_path / name)
    with pytest.raises(DataError, match="data.path: "):
        values(HUB + "nobody/nothing" if package == "datasets" else tmp_path / name)


def test_a_parquet_file_of_another_name_is_recognised(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"PAR1\x00\x01")
    with pytest.raises(DataError, match="x.jsonl is a parquet file; name it .parquet"):
        values(tmp_path / "x.jsonl")


def test_a_csv_file_is_refused_as_one_and_not_row_by_row(tmp_path):
    (tmp_path / "x.csv").write_text("prompt,response\na,b\n")
    with pytest.raises(DataError, match=r"data.path: \S+x.csv is a CSV file; give JSONL or Parquet"):
        values(tmp_path / "x.csv")


def test_a_file_that_a_clone_has_not_fetched_is_recognised(tmp_path):
    (tmp_path / "x.jsonl").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 100\n")
    with pytest.raises(DataError, match="x.jsonl is a git-lfs pointer; run git lfs pull"):
        values(tmp_path / "x.jsonl")


def test_a_path_that_does_not_exist_is_named_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"data.path: {tmp_path}/gone.jsonl does not exist"):
        values("gone.jsonl")


BAD = [b'{"prompt": "a"}', b'{"prompt": ', b'{"prompt": "\xff"}', b"", b'{"prompt": 3}', b'{"prompt": "b"}']


def test_bad_rows_are_skipped_counted_and_told_only_when_asked(tmp_path, tokenizer, caplog):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\n".join(BAD))
    with pytest.raises(DataError) as error:
        read_prompts(path, tokenizer, Data())
    told = str(error.value).splitlines()
    assert [line.split(" ")[0] for line in told] == [f"{path}:{number}:" for number in (2, 3, 5)]
    assert "byte 40 of the file is not UTF-8 (0xff)" in told[1]
    found = read_prompts(path, tokenizer, Data(on_bad_row="skip", max_bad_share=0.6))
    assert [(prompt.text, prompt.row_id) for prompt in found] == [("a", 0), ("b", 4)]
    assert f"skipped 3 of 5 rows that cannot be used ({path}:2, {path}:3, {path}:5): {path}:2: not JSON" in caplog.text


def test_more_bad_rows_than_may_be_skipped_are_an_error(tmp_path, tokenizer):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\n".join(BAD))
    words = "data.max_bad_share: 3 of 5 rows are bad, more than the share 0.01 that may be skipped"
    with pytest.raises(DataError, match=words):
        read_prompts(path, tokenizer, Data(on_bad_row="skip"))
    path.write_bytes(b"[1]\n" + BAD[1])
    with pytest.raises(DataError):
        read_prompts(path, tokenizer, Data(on_bad_row="skip", max_bad_share=1.0))
    rows = [*ROWS, {"prompt": "a", "chosen": "b"}]
    (tmp_path / "pairs").mkdir()
    pairs = write_rows(tmp_path / "pairs" / "pairs.jsonl", rows)
    assert len(read_preferences(Corpus(path=str(pairs), on_bad_row="skip"), tokenizer)) == 2, (
        "one row may always be bad"
    )
