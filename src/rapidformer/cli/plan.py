"""``rapidformer plan``: memory per rank, time, and the layouts that fit, without running it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from rapidformer.cli.own_flags import CommandParser, with_dashes
from rapidformer.cli.run_model import choose_run_model
from rapidformer.cli.run_output import find_flag_problems
from rapidformer.config import Settings, resolve
from rapidformer.config.parse import CommandLine, read_flags
from rapidformer.errors import ConfigurationError, raise_problems
from rapidformer.launch.environment import plan_launch
from rapidformer.planning.devices import DEVICES, GIB, Cluster, parse_devices
from rapidformer.tasks.rows.preflight import find_task_problems

_DEFAULT = "H200"
_SHOWN = 5
_PARTS = {
    "weights": "", "gradients": "", "optimizer": "its state", "activations": "",
    "loss": "logits and what the loss makes of them", "gathers": "whole weights of sharded blocks",
    "buffers": "temporary results", "overhead": "allocator, CUDA context, communicators",
}  # fmt: skip


def run(argv: list[str]) -> None:
    """Measure the model without values, and print what its run will need."""
    parser = _build_parser()
    options, words = parser.parse_known_args(with_dashes(argv))
    if not argv:
        parser.print_help()
        return
    command = read_flags(words)
    args, cluster = _check(command, options)
    from rapidformer.cli.train import run as train
    from rapidformer.planning.capture import has_own_batch_size
    from rapidformer.planning.measure import measure
    from rapidformer.planning.search import Planner

    shape = measure(args, lambda: train(read_flags(words)))
    if args.user_script is not None and not has_own_batch_size(args):
        asked = command.args.replace("the script", micro_batch_size=shape.micro_batch_size)
        args = resolve(asked, world_size=cluster.count)
    planner = Planner(shape, args, cluster)
    if options.json:
        sys.stdout.write(json.dumps(_collect(planner), indent=1) + "\n")
    else:
        sys.stdout.write("\n".join([*_describe(planner), *_answer(planner), ""]))


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
    parser.add("--devices", "NxNAME", "number and kind of devices (default: as many as the run's "
               f"flags start, {_DEFAULT})")  # fmt: skip
    parser.add("--memory-gib", "GIB", "memory of a device, instead of the table's", type=float)
    parser.add("--tflops", "T", "its rate in 16 bits, instead of the table's", type=float)
    parser.add("--json", "", "print everything as JSON")
    return parser


def _check(command: CommandLine, options: Any) -> tuple[Settings, Cluster]:
    """The settings of the planned run and its devices, or all problems at once."""
    problems = find_flag_problems(command, "plan")
    raise_problems(problems)
    known = {"memory_gib": options.memory_gib, "tflops": options.tflops}
    cluster = parse_devices(options.devices or _DEFAULT, **known)
    args = command.args
    if args.user_script is None:
        args = choose_run_model(args, "train")
    if options.devices is None:
        count = plan_launch(args).world_size
        cluster = Cluster(cluster.device, count)
    if args.user_script is None:
        problems += find_task_problems(args, "train", 0, None)
    try:
        args = resolve(args, world_size=cluster.count)
    except ConfigurationError as error:
        problems += [problem for problem in error.problems if problem not in problems]
    raise_problems(problems)
    return args, cluster


def _describe(planner: Any) -> list[str]:
    """The model, the parts of the memory, and the time of a step."""
    from rapidformer.planning.timing import describe_seconds, estimate_run

    shape, args, cluster = planner.shape, planner.settings, planner.cluster
    planned = planner.plan()
    memory, timing = planned.prediction.memory, planned.timing
    parts = {name: size for name, size in memory.by_part().items() if size}
    lines = [
        f"model    {shape.model}, {shape.parameters / 1e6:,.0f} M parameters, {shape.precision}",
        f"batch    {shape.count_rows(args.micro_batch_size):.0f} x {shape.length:,} tokens on a "
        f"rank, {args.global_batch_size:,} samples per step",
        "",
        f"memory of the rank that needs the most, of {cluster.device.memory:.0f} GiB on "
        f"{cluster.describe()}",
        *(
            f"  {name:<12}{size / GIB:>9.2f} GiB   {_PARTS[name]}".rstrip()
            for name, size in parts.items()
        ),
        f"  {'peak':<12}{memory.total / GIB:>9.2f} GiB   "
        + ("fits" if planned.fits(cluster) else "does not fit"),
    ]
    if memory.host:
        lines.append(f"  {'host memory':<12}{memory.host / GIB:>9.2f} GiB   for each rank")
    lines += [
        "",
        f"time     {describe_seconds(timing.step)} per step, {timing.tokens_per_second:,.0f} "
        f"tokens/s, {timing.samples_per_second:,.1f} samples/s",
    ]
    whole = estimate_run(timing, args, cluster, shape.samples)
    if whole is not None:
        lines.append(
            f"run      {whole.updates:,} steps, {describe_seconds(whole.seconds)}, "
            f"{whole.device_hours:,.1f} device hours"
        )
    return lines


def _answer(planner: Any) -> list[str]:
    """The questions that people ask: what fits, and what would make it fit."""
    from rapidformer.planning.timing import describe_seconds

    planned, cluster = planner.plan(), planner.cluster
    lines = [
        f"largest  --micro-batch-size {planner.find_largest_batch()}, or rows of "
        f"{planner.find_longest():,} tokens",
        "",
    ]
    if not planned.fits(cluster):
        switches = planner.list_switches()
        lines += [
            f"to fit   {layout.list_flags()}   {layout.gib:.1f} GiB, "
            f"{describe_seconds(layout.timing.step)} per step"
            for layout in switches[:_SHOWN]
        ] or ["to fit   no single switch is enough"]
        lines.append("")
    layouts = planner.list_layouts()[:_SHOWN]
    lines += ["layouts that fit, fastest first"] if layouts else ["no layout fits these devices"]
    return lines + [
        f"  {describe_seconds(layout.timing.step):>9} {layout.gib:>7.1f} GiB   "
        f"{layout.list_flags() or 'as it is'}"
        for layout in layouts
    ]


def _collect(planner: Any) -> dict[str, Any]:
    planned = planner.plan()
    memory = planned.prediction.memory
    return {
        "model": planner.shape.model, "parameters": planner.shape.parameters,
        "devices": planner.cluster.describe(), "memory": memory.by_part(),
        "peak": memory.total, "host": memory.host, "fits": planned.fits(planner.cluster),
        "work": asdict(planned.prediction.work), "step": planned.timing.step,
        "tokens_per_second": planned.timing.tokens_per_second,
        "largest_micro_batch": planner.find_largest_batch(), "longest": planner.find_longest(),
        "layouts": [
            {"flags": layout.list_flags(), "step": layout.timing.step, "gib": layout.gib}
            for layout in planner.list_layouts()
        ],
    }  # fmt: skip
