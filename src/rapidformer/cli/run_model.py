"""``--load RUN`` in evaluate and predict: the run's best model, or its last one."""

from __future__ import annotations

from pathlib import Path

from rapidformer.config import Settings
from rapidformer.errors import ModelError


def choose_run_model(args: Settings) -> Settings:
    """The arguments with a model folder in ``load``, where a run's folder was given."""
    if not args.is_given("load") or args.load is None:
        return args
    folder = Path(args.load).expanduser()
    if not folder.is_dir() or (folder / "config.json").is_file():
        return args
    for name in ("best", "last"):
        if (folder / name / "config.json").is_file():
            return args.replace(f"the {name} model of {folder}", load=str(folder / name))
    raise ModelError(
        f"--load {args.load} holds no model (no config.json, best or last): give the folder of a "
        "finished run, or one of its models."
    )
