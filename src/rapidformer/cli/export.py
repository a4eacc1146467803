"""``rapidformer export``: a run's model as one folder, its adapter merged into the weights."""

from __future__ import annotations

from pathlib import Path

from rapidformer.cli.run_model import choose_run_model
from rapidformer.config import parse_arguments
from rapidformer.errors import ConfigurationError
from rapidformer.log import configure_logging


def run(argv: list[str]) -> None:
    """Write the model of ``--load`` to ``--save``."""
    args = choose_run_model(parse_arguments(argv), "export")
    if args.load is None and args.is_given("load"):
        raise ConfigurationError(
            f"--load {args.pretrained_model_name_or_path}: no such folder. export takes a run, an "
            "adapter or a model on this machine."
        )
    missing = [flag for flag in ("load", "save") if getattr(args, flag) is None]
    if missing:
        raise ConfigurationError(
            f"export needs {' and '.join(f'--{flag}' for flag in missing)}: --load names a run, an "
            "adapter or a model, --save the folder to write."
        )
    target = Path(args.save or "").expanduser()
    if target.exists():
        raise ConfigurationError(f"--save {target} exists already: choose another folder.")
    configure_logging(args.log_level)
    from rapidformer.checkpoint.merged_export import export_merged

    export_merged(args, target)
