"""Tables of rows, either a `datasets.Dataset` or a plain list of dictionaries; and streams.

Of a stream, what is read here is its head, the first rows; what is mapped or dropped, all of it.
`map_rows` computes its own fingerprint: `datasets` would pickle the tokenizer for one, which takes
longer than processing a small table.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rapidformer.compat.datasets import get_fingerprint, set_fingerprint
from rapidformer.config import Settings
from rapidformer.config.task_sections import DataArguments
from rapidformer.errors import DataError
from rapidformer.log import get_logger

Columns = dict[str, list[Any]]
# rows by column, and the numbers of those rows in the table
RowFunction = Callable[[Columns, list[int]], Columns]

# Below this, starting processes or drawing a progress bar takes longer than the work.
_SMALL_TABLE = 20_000
_BATCH = 1000
# Below this, they are prepared in less than a second.
_CACHED_ROWS = 2000


def get_splits(args: Settings, splits: Mapping[str, Any] | None) -> dict[str, Any]:
    """The given or loaded splits under our names, cut to --max-..-samples."""
    from rapidformer.data.folders import name_splits
    from rapidformer.data.sources import load_splits

    tables = load_splits(args) if splits is None else name_splits(splits, "the given data")
    limits = {
        "train": args.max_train_samples,
        "validation": args.max_eval_samples,
        "test": args.max_predict_samples,
    }
    opened = {name: _open_rows(name, rows, args, limits[name]) for name, rows in tables.items()}
    return {name: take_first(rows, limits[name]) for name, rows in opened.items()}


def _open_rows(split: str, rows: Any, args: DataArguments, limit: int | None) -> Any:
    """The rows; of an iterable data set of the user's own, training rows as a stream."""
    if hasattr(rows, "__len__"):
        return rows
    from rapidformer.data.streams.listing import choose_buffer, load_table, open_stream

    stream = open_stream(rows, shuffle_buffer=choose_buffer(args))
    return stream if split == "train" else load_table(stream.shards, limit)


def as_table(rows: Any) -> Any:
    """The rows, or the first ones of a stream."""
    return list(rows.head) if is_row_stream(rows) else rows


def name_split(split: str, rows: Any) -> str:
    """What a report on these rows is about."""
    return f"the first {len(rows.head):,} samples of {split}" if is_row_stream(rows) else split


def get_first_table(tables: Mapping[str, Any]) -> Any:
    """The first split: its columns are those of all."""
    return as_table(next(iter(tables.values())))


def take_first(rows: Any, limit: int | None) -> Any:
    if is_row_stream(rows):
        return rows  # `--max-train-samples` is refused with it
    return rows if limit is None or len(rows) <= limit else take_rows(rows, 0, limit)


def take_rows(rows: Any, first: int, count: int) -> Any:
    """Some rows from the middle of a table."""
    last = min(first + count, len(rows))
    return rows.select(range(first, last)) if _is_dataset(rows) else rows[first:last]


def select_rows(rows: Any, numbers: Sequence[int]) -> Any:
    if _is_dataset(rows):
        return rows.select(numbers)
    return [rows[number] for number in numbers]


def get_column_names(rows: Any) -> list[str]:
    rows = as_table(rows)
    if _is_dataset(rows):
        return list(rows.column_names)
    return list(dict.fromkeys(name for row in rows for name in row))


def get_column(rows: Any, name: str) -> list[Any]:
    """Every value of a column, as Python objects."""
    rows = as_table(rows)
    if not _is_dataset(rows):
        return [row.get(name) for row in rows]
    if rows.format["type"] is not None:
        rows = rows.with_format(None)
    # A slice: iterating over the column item by item takes a hundred times as long.
    return list(rows[name][:])


def has_columns(
    rows: Any, split: str, names: Sequence[str], *, may_lack: Sequence[str] = ("test",)
) -> bool:
    """Whether a split has the columns that others have; only a test split may go without labels."""
    available = get_column_names(rows)
    missing = [name for name in names if name not in available]
    if missing and split not in may_lack:
        raise DataError(
            f"{split} has no column {' and no '.join(missing)}, only {', '.join(available)}: all "
            "splits need the same columns."
        )
    return not missing


def get_class_names(rows: Any, name: str) -> tuple[str, ...] | None:
    """The class names that a dataset declares for a column of labels, or of lists of labels."""
    is_declared = _is_dataset(rows) or is_row_stream(rows)
    feature = rows.features.get(name) if is_declared else None
    while feature is not None and not hasattr(feature, "names"):
        feature = getattr(feature, "feature", None)
    return tuple(feature.names) if feature is not None else None


def map_rows(
    rows: Any, function: RowFunction, *, workers: int | None, key: Sequence[Any],
    is_one_to_one: bool = False,
) -> Any:  # fmt: skip
    """Map rows to features in batches; ``key`` is what the result depends on, for the cache.

    Of a stream, ranks share the work if the mapping is one to one.
    """
    if is_row_stream(rows):
        names = get_column_names(rows)
        step = partial(_map_part, function=function, names=names)
        return rows.then(step, expands=not is_one_to_one)
    if not _is_dataset(rows):
        return _map_list(rows, function)
    import datasets

    if rows.format["type"] is not None:
        rows = rows.with_format(None)
    text = repr((get_fingerprint(rows), _hash_own_code(), *key))
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:32]
    if len(rows) < _CACHED_ROWS or not datasets.is_caching_enabled():
        return _map_table(rows, function, workers, fingerprint)
    return _map_once(rows, function, workers, fingerprint)


def _map_table(
    rows: Any, function: RowFunction, workers: int | None, fingerprint: str, file: str | None = None
) -> Any:
    is_small = len(rows) < _SMALL_TABLE
    shows_bar = not is_small and sys.stderr.isatty()
    if not is_small and not shows_bar:
        get_logger().info(f"preparing {len(rows):,} rows")
    with contextlib.nullcontext() if shows_bar else quiet_datasets():
        return rows.map(
            function, with_indices=True, batched=True, batch_size=_BATCH,
            remove_columns=rows.column_names, num_proc=None if is_small else workers,
            keep_in_memory=not rows.cache_files, cache_file_name=file if rows.cache_files else None,
            new_fingerprint=fingerprint, desc="Preparing the data",
        )  # fmt: skip


def _map_once(rows: Any, function: RowFunction, workers: int | None, fingerprint: str) -> Any:
    """The same by one process of this machine for all, and for later runs."""
    import datasets
    import pyarrow

    from rapidformer.data.pretraining.cache import RowCache

    is_reused = True

    def write(path: Path) -> None:
        nonlocal is_reused
        is_reused = False
        with TemporaryDirectory(dir=path.parent) as folder:
            file = str(Path(folder) / "rows.arrow")
            features = _map_table(rows, function, workers, fingerprint, file)
            schema = features.features.arrow_schema
            with pyarrow.ipc.new_stream(str(path), schema) as out:
                for part in features.data.table.to_batches(_BATCH):
                    out.write_table(pyarrow.Table.from_batches([part]).cast(schema))

    cache = RowCache()
    if not cache.is_usable():
        return _map_table(rows, function, workers, fingerprint)
    stored = cache.load_or_build("rows", {"rows": fingerprint}, lambda: {"rows": write})
    file = stored.get_file("rows")
    features = datasets.Dataset.from_file(str(file))
    set_fingerprint(features, fingerprint)  # its own depends on the file's date
    if is_reused:
        get_logger().info("cache     %s prepared rows from %s", f"{len(features):,}", file)
    return features


def filter_stream(rows: Any, is_kept: Callable[[dict[str, Any]], bool]) -> Any:
    return rows.then(lambda part, _: [row for row in part if is_kept(row)], expands=True)


def drop_columns(features: Any, names: Sequence[str]) -> Any:
    if is_row_stream(features):
        return features.then(lambda part, _: drop_columns(part, names), expands=False)
    if _is_dataset(features):
        return features.remove_columns([n for n in names if n in features.column_names])
    return [{k: v for k, v in row.items() if k not in names} for row in features]


def _map_list(rows: Sequence[dict[str, Any]], function: RowFunction) -> list[Any]:
    names = get_column_names(rows)
    features: list[Any] = []
    for start in range(0, len(rows), _BATCH):
        part = rows[start : start + _BATCH]
        features += _map_part(part, list(range(start, start + len(part))), function, names)
    return features


def _map_part(
    rows: Sequence[dict[str, Any]], numbers: list[int], function: RowFunction, names: Sequence[str]
) -> list[dict[str, Any]]:
    columns = {name: [row.get(name) for row in rows] for name in names}
    return to_rows(function(columns, numbers))


def to_rows(columns: Mapping[str, Iterable[Any]]) -> list[dict[str, Any]]:
    """Rows of columns of equal length."""
    cells = zip(*columns.values(), strict=True)
    return [dict(zip(columns, values, strict=True)) for values in cells]


def as_rows(rows: Sequence[dict[str, Any] | str], column: str) -> list[dict[str, Any]]:
    """Rows to predict on; a plain string becomes a row with that one column."""
    if not rows:
        raise DataError("There are no rows to predict on.")
    return [{column: row} if isinstance(row, str) else dict(row) for row in rows]


def _is_dataset(rows: Any) -> bool:
    return hasattr(rows, "column_names")


def is_row_stream(rows: Any) -> bool:
    """Whether these are the rows of a stream (``data/streams``), not a table."""
    return hasattr(rows, "is_expanded")


@contextlib.contextmanager
def quiet_datasets() -> Iterator[None]:
    """Without progress bars of ``datasets``."""
    import datasets

    was_off = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not was_off:
            datasets.enable_progress_bars()


def list_own_code() -> list[Path]:
    """The files of the tasks and of what they share."""
    return sorted(Path(__file__).parents[1].rglob("*.py"))


@cache
def _hash_own_code() -> str:
    """A hash of all tasks' code, so that features cached by older code are never reused."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in list_own_code())).hexdigest()
