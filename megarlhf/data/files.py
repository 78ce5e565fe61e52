"""The rows of a data set, each with the place where a person finds it: JSONL, Parquet, or a Hugging Face data set.

Blank lines of JSONL are skipped and do not count as rows; a UTF-8 byte-order mark and CRLF line ends are accepted.
Nothing else is mended: every bad row is an error that names file and line, and all are reported at once; or, if the
settings say so, bad rows are skipped, counted and told, as long as they are few. In Parquet and in data sets every row
has every column, so a column that is null in a row counts as absent from that row.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megarlhf.config.corpus import Texts
from megarlhf.config.settings import Data
from megarlhf.errors import DataError

log = logging.getLogger(__name__)

HUB = "hub:"
"""Before the name of a data set of the Hugging Face hub."""
MAX_REPORTED = 20
"""Faults spelled out in one error; the rows with others are counted."""
NUM_PLACES = 5
"""Rows with one fault, and skipped rows, whose places are told."""
GIT_LFS = b"version https://git-lfs"
"""What a file that a clone has not fetched begins with."""
FOREIGN = (
    (b"PAR1", "a parquet file", "name it .parquet"),
    (b"\x1f\x8b", "a gzip file", "unpack it to JSON lines"),
    (b"PK", "a zip file", "unpack it to JSON lines"),
    (GIT_LFS, "a git-lfs pointer", "run git lfs pull in its folder"),
)
"""First bytes of what is given for JSONL by mistake, and what to do."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Line:
    """One row of a data set, which may still turn out not to be JSON."""

    place: str
    """Where it is, for messages: `file.jsonl:7` or `file.parquet: row 6`."""
    row: int
    """Counts rows from 0."""
    content: str | dict[str, Any]
    fault: str = ""
    """Why the line could not even be read as text."""

    def values(self) -> dict[str, Any]:
        """The row's keys. Raises DataError when the line is not a JSON object."""
        if self.fault:
            raise DataError(self.fault)
        return parse(self.content) if isinstance(self.content, str) else self.content


def lines(path: str, setting: str, split: str = "train") -> Iterator[Line]:
    """The rows of the data set at `path`, in order. `setting` is what the path was given as, `split` which part of a
    data set folder is read. Raises DataError for a path that cannot be read or has another format than its name says.
    """
    if path.startswith(HUB):
        return _data_set_lines(path, setting, split)
    file = Path(path)
    if not file.exists():
        raise DataError(f"{setting}: {file.absolute()} does not exist")
    if file.is_dir():
        return _data_set_lines(path, setting, split)
    if not file.is_file():
        raise DataError(f"{setting}: {file.absolute()} is not a file; give a JSONL or Parquet file")
    if file.suffix.lower() in (".csv", ".tsv"):
        raise DataError(
            f"{setting}: {file.absolute()} is a CSV file; give JSONL or Parquet: "
            "pandas.read_csv(IN).to_json(OUT, orient='records', lines=True)"
        )
    return _parquet_lines(file, setting) if file.suffix == ".parquet" else _json_lines(file, setting)


def read_each(
    rows: Iterable[Line], convert: Callable[[Line], Result], settings: Texts | Data, section: str = "data"
) -> list[Result]:
    """`convert` of every row that can be used.

    Rows for which it raises DataError are bad: their errors are raised as one, rows with the same fault together, or,
    if the settings say skip and they are not too many, the first few places and their number are logged. `section` is
    the name of the settings.
    """
    results, places = [], []
    faults: dict[str, list[str]] = {}
    for line in rows:
        try:
            results.append(convert(line))
        except DataError as error:
            faults.setdefault(str(error), []).append(line.place)
            places.append(line.place)
    if not places:
        return results
    count = len(places) + len(results)
    if settings.on_bad_row == "skip" and results and len(places) <= max(1, settings.max_bad_share * count):
        some = ", ".join(places[:NUM_PLACES]) + (", ..." if len(places) > NUM_PLACES else "")
        first = f"{places[0]}: {next(iter(faults))}"
        log.warning("skipped %d of %d rows that cannot be used (%s): %s", len(places), count, some, first)
        return results
    told = [_fault(message, where) for message, where in faults.items()]
    num_untold = sum(map(len, list(faults.values())[MAX_REPORTED:]))
    more = [f"... and {num_untold} more bad lines"] if num_untold else []
    if settings.on_bad_row == "skip":
        more.append(
            f"{section}.max_bad_share: {len(places)} of {count} rows are bad, more than the share "
            f"{settings.max_bad_share} that may be skipped; correct the file, or raise it"
        )
    raise DataError("\n".join(told[:MAX_REPORTED] + more))


def _fault(message: str, places: list[str]) -> str:
    """What is wrong with the rows at these places."""
    first, *others = places
    if not others:
        return f"{first}: {message}"
    some = ", ".join(others[:NUM_PLACES]) + (f" and {rest} more" if (rest := len(others) - NUM_PLACES) > 0 else "")
    return f"{first}: {message} (the same in {some})"


def parse(text: str) -> dict[str, Any]:
    """A line of JSON, which must be an object, and in which no key is given twice."""
    try:
        row = json.loads(text, object_pairs_hook=_each_key_once)
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}; the line starts with {text[:60]!r}") from error
    if not isinstance(row, dict):
        raise DataError(f'the line is {type_name(row)}; give an object such as {{"prompt": ...}}')
    return row


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for number, name in enumerate(names) if name in names[:number])
        raise DataError(f"key {repeated!r} is given twice; keep one of them")
    return found


def type_name(value: object) -> str:
    """The type of a JSON value in JSON's words."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list"}
    return names.get(type(value), "an object")


def check_text(name: str, value: object) -> None:
    """Raise DataError when `value` (a text, or a list of turns) holds half a character."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name} holds half of a surrogate pair (U+{ord(error.object[error.start]):04X}), which is no character; "
            "write the whole character"
        ) from error


def _json_lines(path: Path, setting: str) -> Iterator[Line]:
    content = _read(path, setting)
    offset = row = 0
    for number, raw in enumerate(content.split(b"\n"), start=1):
        try:
            text = raw.decode("utf-8").strip()
            fault = ""
        except UnicodeDecodeError as error:
            at = f"byte {offset + error.start} of the file is not UTF-8 ({raw[error.start]:#04x})"
            text = fault = f"{at}; save the file as UTF-8"
        offset += len(raw) + 1
        if text:
            yield Line(f"{path}:{number}", row, text, fault)
            row += 1


def _read(path: Path, setting: str) -> bytes:
    """The bytes of a JSONL file without a byte-order mark (a mark is replaced by blanks, so that offsets stay true)."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{setting}: {path.absolute()} cannot be read: {error.strerror}") from error
    for magic, kind, remedy in FOREIGN:
        if content.startswith(magic):
            raise DataError(f"{setting}: {path.absolute()} is {kind}; {remedy}")
    if content.startswith(b"\xef\xbb\xbf"):
        content = b"   " + content[3:]
    if content.lstrip().startswith(b"["):
        raise DataError(f"{setting}: {path.absolute()} is a JSON array; write one object a line (jq -c '.[]' IN > OUT)")
    return content


def _parquet_lines(path: Path, setting: str) -> Iterator[Line]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"{setting}: reading {path.absolute()} needs the package pyarrow; "
            "pip install pyarrow, or convert the file to JSON lines"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches())
            rows = (values for batch in batches for values in batch)
            for row, values in enumerate(rows):
                yield Line(f"{path}: row {row}", row, _without_nulls(values))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{setting}: {path.absolute()} cannot be read as Parquet: {error}") from error


def _data_set_lines(path: str, setting: str, split: str) -> Iterator[Line]:
    where = path if path.startswith(HUB) else str(Path(path).absolute())
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{setting}: {where} is not a file; reading folders and hub data sets needs the package datasets: "
            "pip install datasets, or give one JSONL or Parquet file"
        ) from error
    saved = any((Path(path) / name).exists() for name in ("state.json", "dataset_dict.json"))
    try:
        loaded = datasets.load_from_disk(path) if saved else datasets.load_dataset(path.removeprefix(HUB), split=split)
    except Exception as error:  # the package raises whatever its file systems and builders raise
        raise DataError(f"{setting}: {where} cannot be read as a data set: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"{setting}: {where} has no split {split!r}; its splits are {sorted(loaded)}")
        loaded = loaded[split]
    for row, values in enumerate(loaded):
        yield Line(f"{where}: row {row} of {split}", row, _without_nulls(values))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
