"""``rapidformer predict`` and ``rapidformer.predict``: answers to texts, files or rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.cli.checks import check_call
from rapidformer.cli.inputs import name_input_files, read_input, reads_standard_input
from rapidformer.cli.output import PartialPredictions, compute_key, format_lines, write_predictions
from rapidformer.cli.run_model import choose_run_model
from rapidformer.config import Settings
from rapidformer.config.parse import CommandLine
from rapidformer.data.heads import keep_rows
from rapidformer.errors import ConfigurationError
from rapidformer.log import get_logger

if TYPE_CHECKING:
    from rapidformer.engine import RapidformerEngine

    Rows = Sequence[dict[str, Any] | str]


def run(command: CommandLine) -> None:
    """Write one row per example: to ``--output``, or as JSON lines to the terminal."""
    if command.problems:
        raise ConfigurationError(command.problems)
    args = choose_run_model(name_input_files(command.args), "predict")
    if args.task is None:
        raise ConfigurationError("predict needs --task; `rapidformer tasks` lists them.")
    rows = _read_early(args)
    from rapidformer.engine import RapidformerEngine

    engine = RapidformerEngine(args=args)
    if args.chat:
        from rapidformer.cli.chat import run_chat

        run_chat(engine)
    else:
        _predict(engine, _read_once(engine) if rows is None else rows)
    engine.close(gives_back=False)


def predict(data: Any = None, **settings: Any) -> list[dict[str, Any]]:
    """Answers by call: ``predict("What is a whale?", load="runs/chat", max_new_tokens=50)``.

    The settings are the command's flags. ``data`` replaces --input: a text, a list of texts or
    rows, a `datasets.Dataset` or a file. Every rank gets all answers.
    """
    if isinstance(data, (str, Path, dict)):
        data = [data] if isinstance(data, dict) else [str(data)]
    data = keep_rows(data)
    rows: Rows | None
    if data is None or (len(data) and all(isinstance(row, str) for row in data)):
        named = () if data is None else (list(data), "input")
        args = check_call("predict", settings, *named)
        rows = _read_early(args)
    else:
        args = check_call("predict", settings, data)
        rows = list(islice(data, args.max_predict_samples))
    from rapidformer.engine import RapidformerEngine
    from rapidformer.tasks.evaluation.predicting import predict_task

    engine = RapidformerEngine(args=args)
    try:
        answers = predict_task(engine, _read_once(engine) if rows is None else rows)
        if args.output is not None and engine.is_main:
            write_predictions(answers, Path(args.output).expanduser())
        return answers
    finally:
        engine.close(gives_back=False)


def _read_early(args: Settings) -> Rows | None:
    """Bad files are found at once; None for standard input, which only one rank may read."""
    return None if args.chat or reads_standard_input(args) else read_input(args)


def _read_once(engine: RapidformerEngine) -> Rows:
    from rapidformer.dist.collectives import broadcast_object

    return broadcast_object(read_input(engine.args) if engine.is_main else ())


def _predict(engine: RapidformerEngine, rows: Rows) -> None:
    from rapidformer.tasks.evaluation.predicting import iterate_predictions

    if engine.args.output is not None:
        _predict_to_file(engine, rows, Path(engine.args.output).expanduser())
        return
    for answers in iterate_predictions(engine, rows):
        if engine.is_main and not engine.args.stream:
            sys.stdout.write(format_lines(answers))
            sys.stdout.flush()


def _predict_to_file(engine: RapidformerEngine, rows: Rows, target: Path) -> None:
    from rapidformer.dist.collectives import broadcast_object
    from rapidformer.engine.evaluation import GROUP_BATCHES
    from rapidformer.tasks.evaluation.predicting import get_batch_size, iterate_predictions

    size, start, partial = get_batch_size(engine), 0, None
    if engine.is_main:
        partial = PartialPredictions(target, compute_key(engine.args, rows, size))
        start = partial.resume(GROUP_BATCHES * size)
    start = broadcast_object(start)
    if start and engine.is_main:
        get_logger().info("resuming  after %s of %s rows", f"{start:,}", f"{len(rows):,}")
    try:
        for answers in iterate_predictions(engine, rows, start=start):
            if partial is not None:
                partial.append(answers)
    except KeyboardInterrupt as stop:
        if stop.args or not engine.is_main:
            raise
        sys.stderr.write("\nstopped by Ctrl-C: the same command resumes where it stopped.\n")
        raise KeyboardInterrupt("reported") from None
    if partial is not None:
        partial.finish()
        get_logger().info("written   %s predictions: %s", f"{len(rows):,}", target)
