"""``rapidformer evaluate`` and ``rapidformer.evaluate``: a model's metrics on a split."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.checkpoint.finding import ARGUMENTS_FILE
from rapidformer.cli.checks import check_call
from rapidformer.cli.run_model import choose_run_model
from rapidformer.config import Settings
from rapidformer.config.parse import CommandLine
from rapidformer.data.heads import keep_rows
from rapidformer.errors import ConfigurationError
from rapidformer.log import get_logger
from rapidformer.strict_json import format_json
from rapidformer.tasks.registry import is_pretraining

if TYPE_CHECKING:
    from rapidformer.tasks.evaluation.evaluating import EvaluationReport


def run(command: CommandLine) -> None:
    """Show the report, and write it to ``--output`` or into the run's folder."""
    if command.problems:
        raise ConfigurationError(command.problems)
    asked = command.args
    args = choose_run_model(asked, "evaluate")
    if args.task is None:  # under another launcher, where nothing has been checked yet
        raise ConfigurationError("evaluate needs --task; `rapidformer tasks` lists them.")
    report, is_main = _evaluate(args)
    if not is_main:
        return
    from rich.console import Console

    # Tables are for people; a program that reads stdout gets JSON.
    report.show(Console(stderr=True))
    if not sys.stdout.isatty():
        sys.stdout.write(format_json(report.to_json(), indent=1) + "\n")
    file = _choose_file(asked, report.split)
    if file is None:
        return
    try:
        report.save(file)
    except OSError as error:
        # A file that nobody asked for may fail: the run may be somebody else's, and read-only.
        if asked.output is not None:
            raise
        get_logger().warning(
            f"{file} cannot be written: {error.strerror}. --output FILE writes the metrics "
            "elsewhere."
        )
    else:
        get_logger().info("written   %s", file)


def evaluate(data: Any = None, **settings: Any) -> EvaluationReport:
    """Evaluate by call: ``evaluate(load="runs/mrpc", eval_split="test")``.

    The settings are the command's flags. ``data`` replaces --data-path: a list of rows, a
    `datasets.Dataset`, a dictionary of splits, or a file.
    """
    if isinstance(data, (str, Path)):
        args = check_call("evaluate", settings, str(data), "data_path")
        report, is_main = _evaluate(args)
    else:
        data = keep_rows(data)
        args = check_call("evaluate", settings, data)
        report, is_main = _evaluate(args, data)
    if is_main and args.output is not None:
        report.save(args.output)
    return report


def _evaluate(args: Settings, data: Any = None) -> tuple[EvaluationReport, bool]:
    assert args.task is not None
    from rapidformer.engine import RapidformerEngine

    engine = RapidformerEngine(args=args)
    try:
        if is_pretraining(args.task):
            from rapidformer.tasks.pretraining.runner import evaluate_pretraining

            return evaluate_pretraining(engine), engine.is_main
        from rapidformer.tasks.evaluation.evaluating import evaluate_task

        return evaluate_task(engine, data), engine.is_main
    finally:
        engine.close(gives_back=False)


def _choose_file(args: Settings, split: str) -> Path | None:
    """--output; otherwise a file in the folder of the run that was evaluated, if it is one."""
    if args.output is not None:
        return Path(args.output).expanduser()
    folder = Path(args.load).expanduser() if args.load else None
    if folder is None or not (folder / ARGUMENTS_FILE).is_file():
        return None
    return folder / f"evaluation_{split}.json"
