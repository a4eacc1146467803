"""What ``rapidformer predict`` answers: texts, JSON objects, files, data sets or standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rapidformer.config import Settings
from rapidformer.config.task_sections import RunArguments
from rapidformer.data.files import get_format, open_text
from rapidformer.data.sources import as_list
from rapidformer.errors import ConfigurationError, DataError
from rapidformer.strict_json import format_json, parse_json
from rapidformer.tasks.rows.preflight import STANDARD_INPUT

Row = dict[str, Any] | str


def name_input_files(args: Settings) -> Settings:
    """The settings with files of ``--input`` in ``data_path``, which reads them."""
    if not args.input or not all(_is_data_file(text) for text in args.input):
        return args
    return args.replace("--input", data_path=list(args.input), input=None)


def reads_standard_input(args: RunArguments) -> bool:
    return args.input == [STANDARD_INPUT]


def read_input(args: Settings) -> Sequence[Row]:
    """The rows to predict on, at most ``--max-predict-samples`` of them."""
    if reads_standard_input(args):
        rows: list[Row] = _read_lines(sys.stdin, "standard input")
    elif args.input is not None:
        rows = [_read_one(text, "--input") for text in args.input]
    else:
        rows = _read_data(args)
    return rows[: args.max_predict_samples]


def _is_data_file(text: str) -> bool:
    # Not with Path: a long text is not a file name.
    is_file = os.path.isfile(os.path.expanduser(text))  # noqa: PTH111, PTH113
    return is_file and get_format(Path(text)) is not None


def _read_lines(lines: Iterable[str], place: str) -> list[Row]:
    rows = [_read_one(line.rstrip("\r\n"), place) for line in lines if line.strip()]
    if not rows:
        raise DataError(f"{place} is empty: give one text or JSON object per line.")
    if len({type(row) for row in rows}) > 1:
        raise DataError(
            f"{place} mixes texts and JSON objects: give either texts, or objects with the same "
            "columns."
        )
    return rows


def _read_one(text: str, place: str) -> Row:
    """A text as it is, or the columns of an example as a JSON object."""
    try:
        if not text.lstrip().startswith("{"):
            text.encode()
            return text
        row: Row = parse_json(text)
        format_json(row).encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{place} {text[:60]!r} is not text: it holds bytes that are not UTF-8, or half of a "
            "pair of surrogates."
        ) from None
    except ValueError as reason:
        raise DataError(f"{place} {text[:60]!r} is not valid JSON: {reason}.") from None
    return row


def _read_data(args: Settings) -> list[Row]:
    if args.data_path is None and args.data_dir is None and args.test_data is None:
        raise ConfigurationError(
            "nothing to predict on: give --input TEXT ... or --data-path FILE."
        )
    from rapidformer.data.sources import load_splits

    splits = load_splits(args, may_stream=False)
    split = args.eval_split if args.is_given("eval_split") else None
    name = split or next(name for name in ("test", "validation", "train") if name in splits)
    if name not in splits:
        raise DataError(f"the data has no split {name!r}, only {', '.join(splits)}.")
    rows = list(splits[name])
    if all(_holds_bare_texts(Path(text)) for text in as_list(args.data_path or args.test_data)):
        return [row["text"] for row in rows]
    return rows


def _holds_bare_texts(path: Path) -> bool:
    """Whether a file has no columns: one text per line, or a JSON list of texts."""
    kind = get_format(path)
    if kind not in ("text", "json") or not path.expanduser().is_file():
        return False
    if kind == "text":
        return True
    with open_text(path.expanduser()) as file:
        return "".join(file.read(1000).split())[:2] in ('["', "['")
