"""``rapidformer predict``: a model's answers to texts (``--input``) or a file (``--data-path``)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rapidformer.cli.output import format_lines, write_predictions
from rapidformer.cli.run_model import choose_run_model
from rapidformer.config import Settings, parse_arguments
from rapidformer.errors import ConfigurationError, DataError


def run(argv: list[str]) -> None:
    """Write one row per example: to ``--output``, or as JSON lines to the terminal."""
    args = choose_run_model(parse_arguments(argv), "predict")
    if args.task is None:
        raise ConfigurationError("predict needs --task; `rapidformer tasks` lists them.")
    rows = _read_rows(args)
    from rapidformer.engine import RapidformerEngine
    from rapidformer.tasks.runner import predict_task

    engine = RapidformerEngine(args=args)
    predictions = predict_task(engine, rows[: args.max_predict_samples])
    if engine.is_main:
        if args.output is not None:
            write_predictions(predictions, Path(args.output).expanduser())
        else:
            sys.stdout.write(format_lines(predictions))
    engine.close()


def _read_rows(args: Settings) -> list[dict[str, Any] | str]:
    if args.input is not None:
        return [_read_one(text) for text in args.input]
    if args.data_path is None and args.data_dir is None and args.test_data is None:
        raise ConfigurationError(
            "nothing to predict on: give --input TEXT ... or --data-path FILE."
        )
    from rapidformer.data.sources import load_splits

    splits = load_splits(args)
    split = args.eval_split if args.is_given("eval_split") else None
    name = split or next(name for name in ("test", "validation", "train") if name in splits)
    if name not in splits:
        raise DataError(f"the data has no split {name!r}, only {', '.join(splits)}.")
    return list(splits[name])


def _read_one(text: str) -> dict[str, Any] | str:
    """A text as it is, or the columns of an example as a JSON object."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        row: dict[str, Any] = json.loads(text)
    except ValueError as reason:
        raise DataError(f"--input {text!r} is not valid JSON: {reason}.") from None
    return row
