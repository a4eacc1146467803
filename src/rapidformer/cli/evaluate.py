"""``rapidformer evaluate``: the metrics of a model on a split of the data."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rapidformer.cli.run_model import choose_run_model
from rapidformer.config import parse_arguments
from rapidformer.errors import ConfigurationError
from rapidformer.tasks.registry import is_pretraining


def run(argv: list[str]) -> None:
    """Print the metrics, and write them to ``--output`` if given."""
    args = choose_run_model(parse_arguments(argv), "evaluate")
    if args.task is None:
        raise ConfigurationError("evaluate needs --task; `rapidformer tasks` lists them.")
    if is_pretraining(args.task):
        from rapidformer.tasks.pretraining.runner import evaluate_pretraining as evaluate
    else:
        from rapidformer.tasks.runner import evaluate_task as evaluate
    from rapidformer.engine import RapidformerEngine

    engine = RapidformerEngine(args=args)
    metrics = evaluate(engine)
    if engine.is_main:
        text = json.dumps({"split": args.eval_split, **metrics}, indent=1)
        if args.output is not None:
            Path(args.output).write_text(text + "\n", encoding="utf-8")
        sys.stdout.write(text + "\n")
    engine.close()
