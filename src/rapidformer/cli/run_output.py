"""Runs that ``bench`` and ``verify`` start in new processes, and where their output goes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rapidformer.compat.patches import variables
from rapidformer.config import Settings
from rapidformer.config.derive import is_launched
from rapidformer.config.parse import CommandLine, read_flags
from rapidformer.config.sections import LaunchArguments
from rapidformer.errors import RapidformerError
from rapidformer.launch.environment import LaunchPlan, count_gpus
from rapidformer.tasks.rows.preflight import find_task_problems

Train = Callable[[], None]


@dataclass
class ChildRuns:
    """What the runs of a command have in common."""

    words: list[str]
    args: Settings
    options: Any
    """The command's own flags."""
    processes: int
    folder: Path
    """Their output and results."""


def find_flag_problems(command: CommandLine, verb: str) -> list[str]:
    """Problems with the flags of a run; those of a script are its own business."""
    if command.args.user_script is not None:
        return []
    problems = list(command.problems)  # here every flag must be known
    if command.args.task is None:
        problems.append(
            f"nothing to {verb}: give the flags of a run, with --task (`rapidformer tasks` lists "
            "them) or --user-script FILE.py."
        )
    return problems


def find_run_problems(command: CommandLine, verb: str) -> list[str]:
    """The same, and what is wrong with the model and the data of a task."""
    problems, args = find_flag_problems(command, verb), command.args
    if args.user_script is None and args.task is not None and args.load is None:
        gpus = count_gpus() if args.device == "cuda" else 0
        kept_nothing = args.replace("nothing is kept", save=None)
        problems += find_task_problems(kept_nothing, "train", gpus)
    return problems


def take_part(
    variable: str, kind: type[Any], words: list[str], measure: Callable[[Any, Train], Any]
) -> bool:
    """Train, and save what was measured, if ``start_run`` has started this process for that."""
    if variable not in os.environ or not is_launched():
        return False
    job, rank = kind(**json.loads(os.environ[variable])), int(os.environ["RANK"])
    # The output is of interest only if the run fails.
    sys.stdout.flush()
    sys.stderr.flush()
    path = job.get_path(rank).with_suffix(".log")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    from rapidformer.cli.train import run as train
    from rapidformer.dist.processes import stop_processes

    measure(job, lambda: train(read_flags(words))).save(job.get_path(rank))
    stop_processes()
    return True


def start_run(
    words: list[str], args: LaunchArguments, *, processes: int, variable: str, job: Any, note: str
) -> None:
    """Run a command in new processes, which find the job in a variable; errors get the note."""
    from rapidformer.launch.local import launch

    plan = LaunchPlan(
        processes=processes, nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=0
    )
    try:
        with variables({variable: json.dumps(asdict(job))}):
            launch(plan, words, args)
    except RapidformerError as error:
        error.args = (f"{error}\n{note}",)
        raise
