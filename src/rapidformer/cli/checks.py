"""Report every problem of a black-box command at once, before torch or any process is started."""

from __future__ import annotations

import math

from rapidformer.cli.inputs import name_input_files
from rapidformer.cli.run_model import choose_run_model
from rapidformer.config import Settings, parse_arguments
from rapidformer.config.parse import drop_unknown_flags
from rapidformer.config.validate import find_problems
from rapidformer.errors import ConfigurationError, RapidformerError
from rapidformer.launch.environment import LaunchPlan, count_gpus, plan_launch
from rapidformer.tasks.preflight import find_task_problems


def check_command(name: str, words: list[str]) -> tuple[Settings, LaunchPlan]:
    """The settings of the command and its launch plan, or an error with all problems."""
    problems: list[str] = []
    args = _parse(words, problems)
    if name == "predict":
        args = name_input_files(args)
    if name in ("evaluate", "predict"):
        try:
            args = choose_run_model(args, name)
        except RapidformerError as error:
            problems.append(str(error))
    if (args.stream or args.chat) and args.nproc_per_node is None:
        # One answer at a time: only the ranks that share the model have something to do.
        sizes = (
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.context_parallel_size,
        )
        args = args.replace("--stream or --chat", nproc_per_node=math.prod(sizes))
    plan = plan_launch(args)
    problems += find_problems(args.replace("the launch", world_size=plan.world_size))
    gpus = count_gpus() if args.device == "cuda" else 0
    problems += [p for p in find_task_problems(args, name, gpus) if p not in problems]
    if problems:
        raise ConfigurationError(problems)
    return args, plan


def _parse(words: list[str], problems: list[str]) -> Settings:
    """The settings; unknown flags are collected like other problems, and hide none of them."""
    try:
        return parse_arguments(words)
    except ConfigurationError as error:
        problems += error.problems
        try:
            return parse_arguments(drop_unknown_flags(words))
        except ConfigurationError:
            raise error from None
