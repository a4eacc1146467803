"""``rapidformer [train]``: the black box with ``--task``, the white box with ``--user-script``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from rapidformer.config.parse import CommandLine
from rapidformer.context import mark_as_started
from rapidformer.errors import ConfigurationError


def run(command: CommandLine) -> None:
    """Train in this process."""
    args = command.args
    if args.user_script is not None:
        run_script(args.user_script, command.words)
        return
    if command.problems:
        raise ConfigurationError(command.problems)
    if args.task is None:  # under another launcher, where nothing has been checked yet
        raise ConfigurationError("nothing to train: give --task or --user-script FILE.py.")
    # Imported here, not above: a script decides itself what it imports, and may not need torch.
    from rapidformer.tasks.registry import get_task, is_pretraining

    if is_pretraining(args.task):
        from rapidformer.tasks.pretraining.runner import pretrain as train
    else:
        get_task(args.task)
        from rapidformer.tasks.runner import train_task as train
    from rapidformer.engine import RapidformerEngine

    engine = RapidformerEngine(args=args)
    train(engine)
    engine.close(gives_back=False)


def check_script(script: str) -> None:
    if not Path(script).is_file():
        raise ConfigurationError(f"--user-script {script} is not a file.")


def run_script(script: str, argv: list[str]) -> None:
    """Run the file as ``python FILE.py`` would; its engine reads the same command line."""
    check_script(script)
    sys.argv = [script, *argv]
    mark_as_started()
    sys.path.insert(0, str(Path(script).resolve().parent))
    import rapidformer.dialects.megatron  # noqa: F401 - for scripts that import Megatron's names

    runpy.run_path(script, run_name="__main__")
