"""``rapidformer explain [FLAGS]``: every change that a run would make and why, without torch."""

from __future__ import annotations

import sys

from rapidformer.config import Settings, parse_arguments, resolve
from rapidformer.config.explain import Answer, explain, render
from rapidformer.config.switches import Situation
from rapidformer.errors import collecting, raise_problems
from rapidformer.launch.environment import count_gpus

_STYLES = {"on": "green", "off": "yellow", "not applicable": "dim"}


def run(argv: list[str]) -> None:
    """Print the rows, those that are on first; then what would be refused."""
    args, situation, problems = read_run(argv)
    answers = explain(args, situation)
    if sys.stdout.isatty():
        _show(answers)
    else:
        sys.stdout.writelines(f"{line}\n" for line in render(answers))
    raise_problems(problems)


def read_run(argv: list[str]) -> tuple[Settings, Situation, list[str]]:
    """Settings, device and ranks of the run that these flags would start here."""
    args = parse_arguments(argv)
    gpus = count_gpus() if args.device != "cpu" else 0
    device = "cuda" if args.device == "cuda" or gpus else "cpu"
    ranks = (args.nproc_per_node or max(gpus, 1)) * (args.nnodes or 1)
    args = args.replace("derived: the ranks of this run", world_size=ranks)
    problems: list[str] = []
    with collecting(problems):
        args = resolve(args, world_size=ranks)
    # What auto means is known on the device; a GPU that has no bf16 is older than any we tried.
    asked = args.mixed_precision or ("fp16" if args.fp16 else "bf16" if args.bf16 else "fp32")
    precision = ("bf16" if device == "cuda" else None) if asked == "auto" else asked
    return args, Situation(device=device, precision=precision), problems


def _show(answers: list[Answer]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, header_style="bold", expand=True)
    for title, ratio in (("switch", 3), ("what, and why", 7), ("measured", 5), ("change it by", 5)):
        table.add_column(title, ratio=ratio, overflow="fold")
    state = ""
    for answer in answers:
        if answer.state != state:
            table.add_section()
            state = answer.state
            table.add_row(f"[bold {_STYLES[state]}]{state}[/]")
        row = (answer.name, answer.why, answer.measured, answer.change)
        table.add_row(*row, style="dim" if state == "not applicable" else None)
    Console().print(table)
