"""``rapidformer plan``: memory per rank, time, and the layouts that fit, without running it."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from rapidformer.cli.own_flags import CommandParser
from rapidformer.cli.run_model import choose_run_model
from rapidformer.cli.run_output import find_flag_problems
from rapidformer.config import Settings, resolve
from rapidformer.config.parse import CommandLine, read_flags
from rapidformer.config.sections import AccelerationArguments, LaunchArguments
from rapidformer.errors import collecting, raise_problems
from rapidformer.launch.environment import count_gpus, plan_launch
from rapidformer.planning.devices import (
    DEVICES,
    GIB,
    Cluster,
    Device,
    adjust,
    fit_device,
    parse_devices,
)
from rapidformer.tasks.rows.preflight import find_task_problems

if TYPE_CHECKING:
    from rapidformer.planning.at_hand import BlockTimer

_DEFAULT = "H200"


def run(argv: list[str]) -> None:
    """Measure the model without values, and print what its run will need."""
    options, words = _build_parser().read_run(argv)
    command = read_flags(words)
    with redirect_stdout(sys.stderr):  # scripts and packages print; the answer alone is the output
        args, cluster = _check(command, options)
        from rapidformer.cli.train import run as train
        from rapidformer.planning.answer import answer, describe
        from rapidformer.planning.capture import has_own_batch_size
        from rapidformer.planning.measure import measure
        from rapidformer.planning.search import Planner

        timer = _build_timer(args, options)
        shape = measure(args, lambda: train(read_flags(words)), timer)
    if args.user_script is not None and not has_own_batch_size(args):
        asked = command.args.replace("the script", micro_batch_size=shape.micro_batch_size)
        args = resolve(asked, world_size=cluster.count)
    found = answer(Planner(shape, args, cluster), None if timer is None else timer.problem)
    if options.json:
        text = json.dumps(found, indent=1) + "\n"
    else:
        text = "".join(f"{line}\n" for line in describe(found))
    sys.stdout.write(text)


def _build_parser() -> CommandParser:
    parser = CommandParser(
        prog="rapidformer plan",
        usage="rapidformer plan [--devices 8xH200] [--json] FLAGS OF A RUN",
        description="Say what a run will need: memory per rank by part, time, and the layouts that "
        "fit. The model is followed without values: no GPU is needed, and its size does not "
        "matter.",
        epilog="All other flags are those of the run: rapidformer --help. Devices: "
        f"{', '.join(DEVICES)}.",
        allow_abbrev=False,
    )
    parser.add("--devices", "NxNAME", "number and kind of devices (default: those of this machine, "
               f"or {_DEFAULT})")  # fmt: skip
    parser.add("--memory-gib", "GIB", "memory of a device, instead of the table's", type=float)
    parser.add("--tflops", "T", "its rate in 16 bits, instead of the table's", type=float)
    parser.add("--json", "", "print everything as JSON")
    return parser


def _check(command: CommandLine, options: Any) -> tuple[Settings, Cluster]:
    """The settings of the planned run and its devices, or all problems at once."""
    problems = find_flag_problems(command, "plan")
    raise_problems(problems)
    args = command.args
    if args.user_script is None:
        args = choose_run_model(args, "train")
    cluster = _find_cluster(args, options)
    if args.user_script is None:
        problems += find_task_problems(args, "train", 0, None)
    found: list[str] = []
    with collecting(found):
        args = resolve(args, world_size=cluster.count)
    raise_problems(list(dict.fromkeys([*problems, *found])))
    return args, cluster


def _find_cluster(args: Settings, options: Any) -> Cluster:
    known = {"memory_gib": options.memory_gib, "tflops": options.tflops}
    if options.devices is not None:
        return parse_devices(options.devices, **known)
    device = _measure_device(args) if _has_gpu(args) else DEVICES[_DEFAULT]
    return Cluster(adjust(device, **known), plan_launch(args).world_size)


def _has_gpu(args: LaunchArguments) -> bool:
    return args.device != "cpu" and count_gpus() > 0


def _build_timer(args: Settings, options: Any) -> BlockTimer | None:
    """For the GPU of this machine, if it is the one that is asked about."""
    if options.devices is not None or options.tflops is not None or not _has_gpu(args):
        return None
    import torch

    from rapidformer.planning.at_hand import BlockTimer
    from rapidformer.planning.measure import DTYPES, get_precision

    return BlockTimer(torch.device("cuda", 0), DTYPES[get_precision(args)])


def _measure_device(args: AccelerationArguments) -> Device:
    """The GPU of this machine: its memory, and how fast it multiplies matrices."""
    import torch

    from rapidformer.dist.matrix_rate import measure_matrix_rate
    from rapidformer.planning.measure import DTYPES, get_precision

    found, precision = torch.cuda.get_device_properties(0), get_precision(args)
    rate = measure_matrix_rate(torch.device("cuda", 0), DTYPES[precision] or torch.float32)
    return fit_device(found.name, found.total_memory / GIB, precision, rate)
