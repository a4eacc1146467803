"""Report every problem of a command or call at once, before torch or any process is started."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from rapidformer.cli import DISTRIBUTED
from rapidformer.cli.inputs import name_input_files
from rapidformer.cli.run_model import choose_run_model
from rapidformer.config import Settings, arguments_from_mapping, resolve
from rapidformer.config.derive import is_launched
from rapidformer.config.parse import CommandLine
from rapidformer.config.validate import find_problems
from rapidformer.data.heads import take_head
from rapidformer.errors import collecting, raise_problems
from rapidformer.launch.environment import LaunchPlan, count_gpus, plan_launch
from rapidformer.tasks.rows.preflight import find_task_problems

_FLAG = re.compile(r"--[a-z0-9-]+")


def check_command(name: str, command: CommandLine) -> tuple[Settings, LaunchPlan]:
    """The settings of the command and its launch plan, or an error with all problems."""
    problems = list(command.problems)
    args = _choose_model(name, command.args, problems)
    if (args.stream or args.chat) and args.nproc_per_node is None:
        # One answer at a time: only the ranks that share the model have something to do.
        ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
        ranks *= args.context_parallel_size
        args = args.replace("--stream or --chat", nproc_per_node=ranks)
    plan = plan_launch(args)
    if plan.nodes == 1:
        with collecting(problems):
            resolve(args, world_size=plan.world_size)
    else:
        # Nodes may differ in their number of processes, and batch sizes depend on their sum.
        problems += find_problems(args.replace("the launch", world_size=plan.world_size))
    problems += _find_other_problems(name, args, problems)
    # A value that could not be read is not there: what follows from that is no problem of its own.
    unread = command.find_unread()
    real = [p for p in problems if p in command.problems or unread.isdisjoint(_FLAG.findall(p))]
    raise_problems(real)
    return args, plan


def check_call(
    name: str, settings: Mapping[str, Any], data: Any = None, setting: str | None = None
) -> Settings:
    """The settings of a call, or all problems; ``data``: rows, or the value of a ``setting``."""
    problems: list[str] = []
    named = {} if setting is None else {setting: data}
    args = _choose_model(name, arguments_from_mapping({**settings, **named}), problems)
    if args.chat:
        problems.append(
            "--chat is a conversation in a terminal: type `rapidformer predict --chat`."
        )
    if args.user_script is not None:
        problems.append("user_script= is for the command: a call takes a task.")
    if data is not None:
        problems += [
            f"data= and {name}= exclude each other: give only one of them."
            for name in ("input", "data_path")
            if settings.get(name) is not None
        ]
    # A call starts no processes: it runs in those that a launcher has started, or alone.
    world_size = int(os.environ["WORLD_SIZE"]) if is_launched() else 1
    split = "train" if name == "train" else args.eval_split
    rows = None if data is None or setting else take_head(data, split)
    with collecting(problems):
        resolve(args, world_size=world_size)
    problems += _find_other_problems(name, args, problems, rows)
    raise_problems(problems)
    return args


def _choose_model(name: str, args: Settings, problems: list[str]) -> Settings:
    """The settings with the model that ``--load`` names, and those of its run."""
    if name == "predict":
        args = name_input_files(args)
    if name in DISTRIBUTED:
        with collecting(problems):
            args = choose_run_model(args, name)
    return args


def _find_other_problems(
    name: str, args: Settings, known: list[str], rows: list[Any] | None = None
) -> list[str]:
    gpus = count_gpus() if args.device == "cuda" else 0
    return [p for p in find_task_problems(args, name, gpus, rows) if p not in known]
