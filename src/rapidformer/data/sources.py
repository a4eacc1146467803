"""From whatever the user points at to named splits of rows.

A Hub name, files, a folder, an image folder or a `save_to_disk` folder becomes a dictionary with
the keys train, validation and test. What a reader would get wrong: small files are read by the
few lines here and stay in memory, because only so can a broken line be named by its number and a
run start at once; files above ``LARGE_FILE_BYTES`` go through `datasets`, which keeps them on disk.
Row numbers in messages count from 1.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import functools
import gzip
import json
import os
import re
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.errors import DataError, MissingPackageError
from rapidformer.log import get_logger

if TYPE_CHECKING:
    from datasets import Dataset

LARGE_FILE_BYTES = 256 * 1024 * 1024

# How the text formats are read, by the ending of the name without `.gz`.
_FORMATS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
_IMAGE_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "valid": "validation",
    "validation": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
    "test": "test",
    "predict": "test",
    "prediction": "test",
}


def load_splits(args: Any) -> dict[str, Dataset]:
    """The splits that the data flags name, with keys among train, validation and test."""
    location = _get_location(args)
    splits = _load_location(location, args) if location else {}
    for name, split in (
        ("train_data", "train"),
        ("valid_data", "validation"),
        ("test_data", "test"),
    ):
        files = getattr(args, name)
        if files:
            splits[split] = load_files([_existing(path, name) for path in files], args)
    if not splits:
        raise DataError(
            "No data was given: point --data-path at a file, a folder or a data set on the Hub "
            "(with --data-name where it has several), or give --train-data and --valid-data."
        )
    return splits


def load_prediction_rows(args: Any) -> list[dict[str, Any]]:
    """Every row to predict on, as dictionaries: the test split where there is one.

    A single file counts whatever its name is, since nobody names a file of questions `test`.
    """
    splits = load_splits(args)
    for split in ("test", "validation", "train"):
        if split in splits:
            rows = splits[split]
            limit = args.max_predict_samples
            if limit:
                rows = rows.select(range(min(limit, len(rows))))
            found: list[dict[str, Any]] = rows.to_list()
            return found
    raise DataError("There are no rows to predict on.")


def get_split_name(name: str) -> str | None:
    """Train, validation or test for a split's or file's name; None where the name tells nothing.

    Of GLUE's two validation sets, the matched one is the validation set.
    """
    words = [word for word in re.split(r"[^a-z]+", name.lower()) if word]
    if "mismatched" in words:
        return None
    for word in words:
        if word in _SPLIT_WORDS:
            return _SPLIT_WORDS[word]
    return None


def load_files(paths: Sequence[Path], args: Any) -> Dataset:
    """One data set from files of one split, in the order given."""
    datasets = _import_datasets()
    parts = [_load_file(path, args) for path in paths]
    if len(parts) == 1:
        return parts[0]
    try:
        return datasets.concatenate_datasets(parts)
    except (ValueError, TypeError) as error:
        columns = "; ".join(
            f"{path.name}: {_describe_columns(part)}"
            for path, part in zip(paths, parts, strict=True)
        )
        raise DataError(f"These files do not hold the same columns: {columns}.") from error


def _describe_columns(rows: Dataset) -> str:
    return ", ".join(
        f"{name} ({kind})"
        for name, kind in zip(rows.column_names, rows.data.schema.types, strict=True)
    )


# --- where the data is ---------------------------------------------------------------------------


def _get_location(args: Any) -> list[str]:
    given = args.data_path or args.data_dir
    if not given:
        return []
    return [given] if isinstance(given, str) else [str(item) for item in given]


def _load_location(location: list[str], args: Any) -> dict[str, Dataset]:
    is_here = Path(location[0]).expanduser().exists()
    if len(location) == 1 and not is_here and not _looks_like_path(location[0]):
        return _load_from_hub(location[0], args)
    paths = [_existing(item, "data_path") for item in location]
    if len(paths) == 1 and paths[0].is_dir():
        return _load_folder(_sub_folder(paths[0], args.data_name), args)
    folders = [path for path in paths if path.is_dir()]
    if folders:
        raise DataError(
            f"--data-path names {folders[0]} beside other paths: give one folder or several files."
        )
    return _load_named_files(paths, args)


def _looks_like_path(text: str) -> bool:
    name = text[:-3] if text.endswith(".gz") else text
    return (
        text.startswith((".", "/", "~"))
        or "\\" in text
        or text.count("/") > 1
        or text.endswith("/")
        or Path(name).suffix.lower() in _FORMATS
    )


def _existing(text: str, setting: str) -> Path:
    path = Path(text).expanduser()
    if path.exists():
        return path
    flag = "--" + setting.replace("_", "-")
    parent = path.parent
    if not parent.is_dir():
        raise DataError(f"{flag} {text}: there is no such file or folder (nor a folder {parent}).")
    near = difflib.get_close_matches(path.name, _list(parent), n=1, cutoff=0.5)
    hint = f" Did you mean {parent / near[0]}?" if near else ""
    raise DataError(f"{flag} {text}: there is no such file or folder.{hint}")


def _list(folder: Path) -> list[str]:
    return sorted(child.name for child in folder.iterdir())


def _sub_folder(folder: Path, name: str | None) -> Path:
    if name is None:
        return folder
    if (folder / name).is_dir():
        return folder / name
    children = sorted(child.name for child in folder.iterdir() if child.is_dir())
    # A name that only picks the metric (a local folder with MRPC's files and --data-name mrpc).
    if not children or any(get_split_name(child) for child in children):
        return folder
    if any(get_format(child) for child in folder.iterdir()):
        return folder
    raise DataError(
        f"--data-name {name}: {folder} has no such sub-folder; it has {', '.join(children)}."
    )


def get_format(path: Path) -> str | None:
    """json, csv, tsv, parquet, arrow or text by the ending of the name; None for anything else."""
    name = path.name.lower().removesuffix(".gz")
    return _FORMATS.get(Path(name).suffix) if not name.startswith(".") else None


# --- folders -------------------------------------------------------------------------------------


def _load_folder(folder: Path, args: Any) -> dict[str, Dataset]:
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        return _load_saved(folder)
    files = sorted(p for p in folder.iterdir() if p.is_file() and _is_data_file(p))
    if files:
        return _load_named_files(files, args)
    by_split = {
        get_split_name(p.name): p
        for p in sorted(folder.iterdir())
        if p.is_dir() and get_split_name(p.name)
    }
    if by_split:
        return {str(split): _load_split_folder(path, args) for split, path in by_split.items()}
    if _is_image_folder(folder):
        return {"train": _load_image_folder(folder, None)}
    found = ", ".join(_list(folder)[:8]) or "nothing"
    raise DataError(
        f"{folder} holds no data files: expected json, jsonl, csv, tsv, parquet, arrow or txt "
        "files named train..., valid... or test..., image folders, or a folder written by "
        f"save_to_disk; it holds {found}."
    )


def _is_data_file(path: Path) -> bool:
    # Folders of data often carry such side files, which are JSON but no rows.
    side_files = {"dataset_info.json", "dataset_infos.json", "state.json", "config.json"}
    return get_format(path) is not None and path.name not in side_files


def _load_saved(folder: Path) -> dict[str, Dataset]:
    datasets = _import_datasets()
    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(
            f"{folder} looks like a save_to_disk folder but cannot be read: {_first_line(error)}"
        ) from error
    if isinstance(saved, datasets.Dataset):
        return {get_split_name(folder.name) or "train": _not_empty(saved, str(folder))}
    return name_splits(saved, str(folder))


def name_splits(found: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Any mapping of splits under our three names; the first of several that fit is kept."""
    splits: dict[str, Any] = {}
    left_out: list[str] = []
    for name, rows in found.items():
        split = get_split_name(name)
        if split is None or split in splits:
            left_out.append(name)
        else:
            splits[split] = _not_empty(rows, f"{source} ({name})")
    if not splits and len(found) == 1:
        splits["train"] = next(iter(found.values()))
    elif left_out:
        get_logger().info("%s: the splits %s are not used.", source, ", ".join(left_out))
    if not splits:
        raise DataError(
            f"{source} has the splits {', '.join(found)}: none of them is named train, "
            "validation or test. Give files with --train-data and --valid-data."
        )
    return splits


def _load_named_files(files: Sequence[Path], args: Any) -> dict[str, Dataset]:
    by_split: dict[str, list[Path]] = {}
    unnamed: list[Path] = []
    for path in files:
        split = get_split_name(path.name.split(".")[0])
        if split is None:
            unnamed.append(path)
        else:
            by_split.setdefault(split, []).append(path)
    if unnamed and by_split:
        names = ", ".join(path.name for path in unnamed)
        get_logger().warning("%s: no split in the name, so not used (train, valid, test).", names)
    elif unnamed:
        by_split["train"] = unnamed
    return {split: load_files(paths, args) for split, paths in by_split.items()}


def _load_split_folder(folder: Path, args: Any) -> Dataset:
    files = sorted(p for p in folder.iterdir() if p.is_file() and _is_data_file(p))
    if files:
        return load_files(files, args)
    if (folder / "state.json").exists():
        return _load_saved(folder)["train"]
    if _is_image_folder(folder):
        train = next(
            (p for p in folder.parent.iterdir() if get_split_name(p.name) == "train"), None
        )
        return _load_image_folder(folder, _class_names(train) if train else None)
    raise DataError(f"{folder} holds neither data files nor sub-folders with images.")


def _class_names(folder: Path) -> list[str]:
    return sorted(child.name for child in folder.iterdir() if child.is_dir())


def _is_image_folder(folder: Path) -> bool:
    return any(p.suffix.lower() in _IMAGE_ENDINGS for p in folder.glob("*/*"))


def _load_image_folder(folder: Path, names: list[str] | None) -> Dataset:
    """Class sub-folders as rows of image and label; images are read when they are needed."""
    datasets = _import_datasets()
    names = names or _class_names(folder)
    unknown = sorted(set(_class_names(folder)) - set(names))
    if unknown:
        raise DataError(
            f"{folder} has the classes {', '.join(unknown)}, which the training images do not "
            f"have: they have {', '.join(names)}."
        )
    paths = [(p, i) for i, name in enumerate(names) for p in sorted((folder / name).glob("*"))]
    images = [(str(p), i) for p, i in paths if p.suffix.lower() in _IMAGE_ENDINGS]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    )
    columns = {"image": [path for path, _ in images], "label": [label for _, label in images]}
    return datasets.Dataset.from_dict(columns, features=features)


# --- files ---------------------------------------------------------------------------------------


def _load_file(path: Path, args: Any) -> Dataset:
    kind = get_format(path)
    if path.is_dir():
        return _load_split_folder(path, args)
    if kind is None:
        raise DataError(
            f"{path}: this kind of file cannot be read; use {', '.join(sorted(_FORMATS))}."
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty (0 bytes).")
    if kind in ("parquet", "arrow"):
        return _not_empty(_load_columnar(path, kind, args), str(path))
    if path.stat().st_size > LARGE_FILE_BYTES:
        return _not_empty(_load_large(path, kind, args), str(path))
    readers = {"json": _read_json, "csv": _read_table, "tsv": _read_table, "text": _read_text}
    try:
        return _not_empty(readers[kind](path), str(path))
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {_first_line(error)}") from error


def _open_text(path: Path) -> Any:
    # utf-8-sig: spreadsheets put a byte-order mark before the first column's name.
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _read_text(path: Path) -> Dataset:
    with _open_text(path) as file:
        lines = [line.rstrip("\r\n") for line in file]
    return _import_datasets().Dataset.from_dict({"text": [line for line in lines if line.strip()]})


def _read_json(path: Path) -> Dataset:
    with _open_text(path) as file:
        text = file.read()
    start = text.lstrip()[:1]
    rows = _parse_json_document(text, path) if start == "[" else None
    if rows is None and start == "{":
        # A whole document ({"data": [...]}) and the first of many lines both begin so.
        with contextlib.suppress(json.JSONDecodeError):
            rows = _rows_of_document(json.loads(text), path)
    return _from_rows(rows if rows is not None else _parse_json_lines(text, path), path)


def _parse_json_document(text: str, path: Path) -> list[Any]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: not valid JSON ({error.msg}).") from None
    return list(rows)


def _rows_of_document(document: Any, path: Path) -> list[Any]:
    if not isinstance(document, dict):
        return [document]
    rows = document.get("data")
    if not isinstance(rows, list):
        return [document]
    if rows and isinstance(rows[0], dict) and "paragraphs" in rows[0]:
        return list(_flatten_squad(rows))
    return rows


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


def _parse_json_lines(text: str, path: Path) -> list[Any]:
    rows: list[Any] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}, line {number}: not valid JSON ({error.msg}, column {error.colno}): "
                f"{line.strip()[:60]}"
            ) from None
    return rows


def _from_rows(rows: list[Any], path: Path) -> Dataset:
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise DataError(
                f"{path}, row {number}: each row must be a JSON object such as "
                f'{{"text": "...", "label": 0}}, but this is {json.dumps(row)[:60]}.'
            )
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names}
    try:
        return _import_datasets().Dataset.from_dict(columns)
    except Exception as error:  # Arrow raises several kinds for a column of mixed types
        raise DataError(_describe_mixed_column(columns, path, error)) from error


def _describe_mixed_column(columns: Mapping[str, list[Any]], path: Path, error: Exception) -> str:
    for name, values in columns.items():
        first = next((value for value in values if value is not None), None)
        for number, value in enumerate(values, start=1):
            if value is not None and not _is_same_kind(first, value):
                return (
                    f"{path}, row {number}: the column {name} holds {value!r} "
                    f"({type(value).__name__}), but {first!r} ({type(first).__name__}) before: "
                    "a column must hold one type."
                )
    return f"{path}: the rows do not form a table: {_first_line(error)}"


def _is_same_kind(first: Any, value: Any) -> bool:
    numbers = (int, float)
    return type(first) is type(value) or (isinstance(first, numbers) and isinstance(value, numbers))


def _read_table(path: Path) -> Dataset:
    import pandas

    # "NA" and "None" are sentences and names too, so only an empty cell is missing. GLUE's and
    # other tab-separated files hold lone quotes, which quoting rules would join lines over.
    tabs = get_format(path) == "tsv"
    options: dict[str, Any] = {"sep": "\t", "quoting": csv.QUOTE_NONE} if tabs else {}
    try:
        table = pandas.read_csv(
            path,
            keep_default_na=False,
            na_values=[""],
            dtype_backend="numpy_nullable",
            encoding="utf-8-sig",
            **options,
        )
    except pandas.errors.EmptyDataError:
        raise DataError(f"{path} is empty: it has no line with column names.") from None
    except pandas.errors.ParserError as error:
        raise DataError(f"{path} is not a proper table: {_first_line(error)}") from None
    return _import_datasets().Dataset.from_pandas(table, preserve_index=False)


def _load_columnar(path: Path, kind: str, args: Any) -> Dataset:
    datasets = _import_datasets()
    try:
        if kind == "parquet":
            return datasets.Dataset.from_parquet(str(path), cache_dir=args.cache_dir)
        try:
            return datasets.Dataset.from_file(str(path))
        except Exception:
            # Arrow's other file layout (Feather), which has no stream to map.
            import pyarrow.feather

            return datasets.Dataset(pyarrow.feather.read_table(str(path)))
    except Exception as error:
        cause = error.__cause__ or error
        raise DataError(f"{path} cannot be read as {kind}: {_first_line(cause)}") from error


def _load_large(path: Path, kind: str, args: Any) -> Dataset:
    datasets = _import_datasets()
    builder = "csv" if kind == "tsv" else kind
    options: dict[str, Any] = {}
    if kind == "tsv":
        options = {"sep": "\t", "quoting": csv.QUOTE_NONE}
    if builder == "csv":
        options |= {"keep_default_na": False, "na_values": [""]}
    try:
        return datasets.load_dataset(
            builder, data_files=str(path), split="train", cache_dir=args.cache_dir, **options
        )
    except Exception as error:
        if kind == "json":
            _raise_first_bad_line(path)
        raise DataError(
            f"{path} cannot be read: {_first_line(error.__cause__ or error)}"
        ) from error


def _raise_first_bad_line(path: Path) -> None:
    with _open_text(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                json.loads(line or "null")
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: not valid JSON ({error.msg}): {line.strip()[:60]}"
                ) from None


def _not_empty(rows: Any, source: str) -> Any:
    if len(rows) == 0:
        raise DataError(f"{source} holds no rows.")
    return rows


# --- the Hub -------------------------------------------------------------------------------------


def _load_from_hub(name: str, args: Any) -> dict[str, Dataset]:
    datasets = _import_datasets()
    full_name = f"{name} ({args.data_name})" if args.data_name else name
    online = _is_hub_reachable()
    try:
        with contextlib.nullcontext() if online else _offline():
            found = datasets.load_dataset(name, args.data_name, cache_dir=args.cache_dir)
    except Exception as error:
        raise DataError(
            _describe_hub_failure(full_name, name, args.data_name, error, online)
        ) from error
    if isinstance(found, datasets.Dataset):
        return {"train": found}
    return name_splits(found, full_name)


def _describe_hub_failure(
    full_name: str, name: str, data_name: str | None, error: Exception, online: bool
) -> str:
    configurations = re.findall(r"'([^']+)'", str(error).partition("[")[2])
    if isinstance(error, ValueError) and configurations:
        if data_name is None:
            return (
                f"The data set {name} has several parts: choose one with --data-name: "
                + ", ".join(configurations)
            )
        near = difflib.get_close_matches(data_name, configurations, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return f"The data set {name} has no part {data_name}: {', '.join(configurations)}.{hint}"
    if not online:
        return (
            f"The data set {full_name} is neither a file or folder here nor in the local cache, "
            "and the Hugging Face Hub cannot be reached: check the spelling or the network, or "
            "give a local file or folder with --data-path."
        )
    if type(error).__name__ in ("DatasetNotFoundError", "FileNotFoundError"):
        return (
            f"The data set {full_name} is neither a file or folder here nor on the Hugging Face "
            "Hub (or it is private): check the spelling of --data-path."
        )
    return f"The data set {full_name} cannot be loaded: {_first_line(error)}"


@functools.cache
def _is_hub_reachable(seconds: float = 4.0) -> bool:
    """Whether a connection to the Hub opens; without this a lookup retries for minutes."""
    truths = {"1", "true", "yes", "on"}
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        if os.environ.get(name, "").lower() in truths:
            return False
    if urllib.request.getproxies():
        return True
    endpoint = urllib.parse.urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    opened: list[bool] = []

    def connect() -> None:
        with contextlib.suppress(OSError):
            socket.create_connection((endpoint.hostname or "", port), timeout=seconds).close()
            opened.append(True)

    # In a thread, because the look-up of the name knows no time limit.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(opened)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Let `datasets` look into its cache only, instead of retrying a Hub that is not there."""
    import datasets.config
    import huggingface_hub.constants

    modules: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise MissingPackageError("datasets", "Loading data from files or the Hub") from None
    return datasets


def _first_line(error: BaseException) -> str:
    lines: Iterable[str] = str(error).strip().splitlines() or [type(error).__name__]
    text = next(iter(lines)).strip()
    return text if text.endswith(".") else text + "."
