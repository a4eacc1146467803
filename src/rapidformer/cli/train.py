"""``rapidformer [train]`` and ``rapidformer.train``: train a task, or run a ``--user-script``."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rapidformer.cli.checks import check_call
from rapidformer.cli.run_model import choose_run_model
from rapidformer.config import Settings
from rapidformer.config.parse import CommandLine
from rapidformer.context import mark_as_started
from rapidformer.data.files import import_datasets
from rapidformer.data.heads import keep_rows
from rapidformer.data.sources import hold_out
from rapidformer.errors import ConfigurationError


def run(command: CommandLine) -> None:
    if command.args.user_script is not None:
        args = None if command.problems else command.args
        run_script(command.args.user_script, command.words, args)
        return
    if command.problems:
        raise ConfigurationError(command.problems)
    args = choose_run_model(command.args, "train")
    if args.task is None:  # under another launcher, where nothing has been checked yet
        raise ConfigurationError("nothing to train: give --task or --user-script FILE.py.")
    _train(args)


def train(data: Any = None, **settings: Any) -> dict[str, float]:
    """Train by call: ``train(rows, task="causal_lm", load="org/model", save="runs/chat")``.

    The settings are the command's flags. ``data`` replaces --data-path: a list of rows, a
    DataFrame, a `datasets.Dataset`, a dictionary of splits, or a file. Returns the metrics of the
    last evaluation.
    """
    if isinstance(data, (str, Path)):
        return _train(check_call("train", settings, str(data), "data_path"))
    data = keep_rows(data)
    args = check_call("train", settings, data)
    if data is None:
        return _train(args)
    splits = dict(data) if isinstance(data, Mapping) else {"train": data}
    if args.validation_split and isinstance(splits.get("train"), list):
        splits["train"] = import_datasets().Dataset.from_list(splits["train"])
    held = hold_out(splits, args.validation_split, args.seed) if args.validation_split else splits
    return _train(args, held)


def _train(args: Settings, splits: Mapping[str, Any] | None = None) -> dict[str, float]:
    # Imported here, not above: a script decides itself what it imports, and may not need torch.
    from rapidformer.engine import RapidformerEngine
    from rapidformer.tasks.pretraining.runner import pretrain
    from rapidformer.tasks.registry import get_task, is_pretraining
    from rapidformer.tasks.runner import train_task

    assert args.task is not None
    pretrains = is_pretraining(args.task)
    if not pretrains:
        get_task(args.task)  # an unknown one is found before the engine starts
    engine = RapidformerEngine(args=args)
    try:
        return pretrain(engine) if pretrains else train_task(engine, splits)
    finally:
        engine.close(gives_back=False)


def check_script(script: str) -> None:
    if not Path(script).is_file():
        raise ConfigurationError(f"--user-script {script} is not a file.")


def run_script(script: str, argv: list[str], args: Settings | None = None) -> None:
    """Run the file as ``python FILE.py`` would; its engine has the same command line."""
    check_script(script)
    sys.argv = [script, *argv]
    mark_as_started(None if args is None else (argv, args))
    sys.path.insert(0, str(Path(script).resolve().parent))
    import rapidformer.dialects.megatron  # noqa: F401 - for scripts that import Megatron's names

    runpy.run_path(script, run_name="__main__")
