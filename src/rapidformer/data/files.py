"""One file of rows: json, jsonl, csv, tsv, parquet, arrow or txt, with errors that name the line.

Small files are read here and stay in memory, because only then can a broken line be named by its
number and a run start at once; files above ``LARGE_FILE_BYTES`` go through `datasets`, which keeps
them on disk. Row numbers start at 1.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.compat.datasets import set_fingerprint
from rapidformer.errors import DataError, MissingPackageError
from rapidformer.strict_json import describe_fault, parse_json

if TYPE_CHECKING:
    from datasets import Dataset

LARGE_FILE_BYTES = 256 * 1024 * 1024

# How a file is read, by its suffix without `.gz`.
_FORMATS = {
    ".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "tsv",
    ".parquet": "parquet", ".arrow": "arrow", ".txt": "text",
}  # fmt: skip


def get_format(path: Path) -> str | None:
    """json, csv, tsv, parquet, arrow or text by the file suffix; None for anything else."""
    name = path.name.lower().removesuffix(".gz")
    return _FORMATS.get(Path(name).suffix) if not name.startswith(".") else None


def check_file(path: Path) -> str:
    """The format of a file that has something in it."""
    kind = get_format(path)
    if kind is None:
        raise DataError(
            f"{path}: this file type is not supported; use {', '.join(sorted(_FORMATS))}."
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty (0 bytes).")
    return kind


def load_file(path: Path, cache_dir: str | None) -> Dataset:
    """The rows of a file, whatever its format."""
    kind = check_file(path)
    digest = hash_file(path)[:32]
    # One folder for each content: `datasets` knows a file by its name, size and date alone.
    base = cache_dir or str(import_datasets().config.HF_DATASETS_CACHE)
    folder = str(Path(base) / "files" / digest)
    if kind in ("parquet", "arrow"):
        rows = _load_columnar(path, kind, folder)
    elif path.stat().st_size > LARGE_FILE_BYTES:
        rows = _load_large(path, kind, folder)
    else:
        readers = {"json": _read_json, "csv": _read_table, "tsv": _read_table, "text": _read_text}
        try:
            rows = readers[kind](path)
        except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
            reason = get_first_line(error)
            raise DataError(
                f"{path} cannot be read as UTF-8 text: {reason} If it is text, save it as UTF-8."
            ) from error
    set_fingerprint(check_not_empty(rows, str(path)), f"{kind}-{digest}")
    return rows


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_not_empty(rows: Any, source: str) -> Any:
    """The rows; there is at least one, unless they are a stream's."""
    if hasattr(rows, "__len__") and len(rows) == 0:
        raise DataError(f"{source} holds no rows.")
    return rows


def import_datasets() -> Any:
    """The package `datasets`, which rows in memory do not need."""
    try:
        import datasets
    except ImportError:
        raise MissingPackageError("datasets", "Loading data from files or the Hub") from None
    return datasets


def without_decoding(rows: Any, kind: str, *columns: str) -> Any:
    """The rows with the images (``Image``) or recordings (``Audio``) of columns as stored.

    `datasets` would decode them where rows are read, and cannot name the row of a broken file.
    """
    features = getattr(rows, "features", None) or {}
    for column in columns if hasattr(rows, "cast_column") else ():
        kept = _keep_encoded(features.get(column), kind)
        if kept is not features.get(column):
            rows = rows.cast_column(column, kept)
    return rows


def _keep_encoded(feature: Any, kind: str) -> Any:
    """The feature without decoding; the same object if it has nothing of the kind."""
    if type(feature).__name__ == kind:
        return type(feature)(decode=False)
    if isinstance(feature, dict):
        changed = {name: _keep_encoded(part, kind) for name, part in feature.items()}
        is_same = all(changed[name] is part for name, part in feature.items())
        return feature if is_same else changed
    inner = getattr(feature, "feature", None)
    kept = None if inner is None else _keep_encoded(inner, kind)
    return feature if kept is inner else type(feature)(kept)


def get_first_line(error: BaseException) -> str:
    """The first line of another package's message, as a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = lines[0].strip()
    return text if text.endswith(".") else text + "."


def open_text(path: Path) -> Any:
    """A text file, plain or gzipped."""
    # utf-8-sig: spreadsheets write a byte-order mark before the first column name.
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _read_text(path: Path) -> Dataset:
    with open_text(path) as file:
        lines = [line.rstrip("\r\n") for line in file]
    return import_datasets().Dataset.from_dict({"text": [line for line in lines if line.strip()]})


def _read_table(path: Path) -> Dataset:
    import pandas

    options = _get_table_options(str(get_format(path)))
    try:
        with _refusing_lost_cells():
            table = pandas.read_csv(
                path, dtype_backend="numpy_nullable", encoding="utf-8-sig", **options
            )
    except pandas.errors.EmptyDataError:
        raise DataError(f"{path} is empty: it has no line with column names.") from None
    except (pandas.errors.ParserError, pandas.errors.ParserWarning) as error:
        reason = _find_long_row(path) or get_first_line(error)
        raise DataError(f"{path} is not a proper table: {reason}") from None
    return import_datasets().Dataset.from_pandas(table, preserve_index=False)


@contextlib.contextmanager
def _refusing_lost_cells() -> Iterator[None]:
    """pandas only warns where it leaves out cells that have no column."""
    import pandas

    with warnings.catch_warnings():
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        yield


def _find_long_row(path: Path) -> str | None:
    """The first row with more cells than there are columns, and what to do."""
    with open_text(path) as file:
        rows = csv.reader(file, **get_table_dialect(path))
        width = len(next(rows, []))
        for row in rows:
            if len(row) > width:
                cause = "tabs" if get_format(path) == "tsv" else "commas outside double quotes"
                return f"line {rows.line_num} has {len(row)} cells for {width} columns: {cause}?"
    return None


def get_table_dialect(path: Path) -> dict[str, Any]:
    """How Python's csv module reads a table of text."""
    is_tsv = get_format(path) == "tsv"
    return {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if is_tsv else {}


def _get_table_options(kind: str) -> dict[str, Any]:
    """pandas' options, which `datasets` passes on, so that small and large files are read alike."""
    # "NA" and "None" are sentences and names too, so only an empty cell is missing. GLUE's and
    # other tab-separated files contain lone quotes; quoting rules would join lines over them.
    # If all rows are one cell too long, pandas would take the first ones for the rows' names.
    options: dict[str, Any] = {"keep_default_na": False, "na_values": [""], "index_col": False}
    return options | ({"sep": "\t", "quoting": csv.QUOTE_NONE} if kind == "tsv" else {})


def _read_json(path: Path) -> Dataset:
    with open_text(path) as file:
        text = file.read()
    if text.lstrip().startswith("["):
        try:
            rows = parse_json(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {error.lineno}: not valid JSON ({error.msg}).") from None
        except ValueError as error:
            raise DataError(f"{path}: not valid JSON ({error}).") from None
        return build_table(rows, path)
    try:
        # A whole document ({"data": [...]}) and the first of many lines both start with a brace.
        document = parse_json(text) if text.lstrip().startswith("{") else None
    except ValueError:
        document = None
    if document is None:
        return build_table(list(parse_json_lines(text.split("\n"), path)), path)
    rows = document.get("data")
    if not isinstance(rows, list):
        rows = [document]
    elif rows and isinstance(rows[0], dict) and "paragraphs" in rows[0]:
        try:
            rows = list(_flatten_squad(rows))
        except (LookupError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} is not in SQuAD's format: {type(error).__name__}: {error}. It nests "
                'questions ("qas") in "paragraphs" with a "context" in the articles of "data".'
            ) from None
    return build_table(rows, path)


def _flatten_squad(articles: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """SQuAD's published files nest questions in paragraphs in articles; a row is a question."""
    for article in articles:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                answers = question.get("answers", [])
                yield {
                    "id": str(question.get("id", "")),
                    "title": article.get("title", ""),
                    "context": paragraph["context"],
                    "question": question["question"],
                    "answers": {
                        "text": [answer["text"] for answer in answers],
                        "answer_start": [answer["answer_start"] for answer in answers],
                    },
                }


def parse_json_lines(lines: Iterable[str], path: Path) -> Iterator[Any]:
    """One row per line; a line that is not JSON is named by its number."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield parse_json(line)
        except ValueError as error:
            what = f"({describe_fault(error)}): {line.strip()[:60]}"
            raise DataError(f"{path}, line {number}: not valid JSON {what}") from None


def build_table(rows: list[Any], path: Path | str) -> Dataset:
    """A table of rows; ``path`` is where they are from."""
    if rows and all(isinstance(row, str) for row in rows):
        rows = [{"text": row} for row in rows]
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise DataError(
                f"{path}, row {number}: each row must be a JSON object such as "
                f'{{"text": "...", "label": 0}}, but this is {str(row)[:60]}.'
            )
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names}
    datasets = import_datasets()
    try:
        return datasets.Dataset.from_dict(columns)
    except Exception as error:  # Arrow raises several kinds of error for a column of mixed types
        raise DataError(_describe_mixed_column(columns, path, error)) from error


def _describe_mixed_column(
    columns: Mapping[str, list[Any]], path: Path | str, error: Exception
) -> str:
    numbers = (int, float)
    for name, values in columns.items():
        first = next((value for value in values if value is not None), None)
        for number, value in enumerate(values, start=1):
            are_numbers = isinstance(first, numbers) and isinstance(value, numbers)
            if value is not None and type(first) is not type(value) and not are_numbers:
                return (
                    f"{path}, row {number}: the column {name} holds {value!r} "
                    f"({type(value).__name__}), but {first!r} ({type(first).__name__}) before: "
                    "a column must hold one type."
                )
    return f"{path}: the rows do not form a table: {get_first_line(error)}"


def _load_columnar(path: Path, kind: str, cache_dir: str) -> Dataset:
    datasets = import_datasets()
    try:
        if kind == "parquet":
            return datasets.Dataset.from_parquet(str(path), cache_dir=cache_dir)
        try:
            return datasets.Dataset.from_file(str(path))
        except Exception:
            # Arrow's other file layout (Feather), which has no stream to map.
            import pyarrow.feather

            return datasets.Dataset(pyarrow.feather.read_table(str(path)))
    except Exception as error:
        cause = error.__cause__ or error
        raise DataError(f"{path} cannot be read as {kind}: {get_first_line(cause)}") from error


def _load_large(path: Path, kind: str, cache_dir: str) -> Dataset:
    datasets = import_datasets()
    is_table = kind in ("csv", "tsv")
    builder, options = ("csv", _get_table_options(kind)) if is_table else (kind, {})
    try:
        with _refusing_lost_cells():
            return datasets.load_dataset(
                builder, data_files=str(path), split="train", cache_dir=cache_dir, **options
            )
    except Exception as error:
        if kind == "json":
            with open_text(path) as file:
                for _ in parse_json_lines(file, path):
                    pass  # up to the first bad line, which is an error
        reason = _find_long_row(path) if is_table else None
        reason = reason or get_first_line(error.__cause__ or error)
        raise DataError(f"{path} cannot be read: {reason}") from error
