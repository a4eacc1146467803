"""``rapidformer runs``: the runs and checkpoints in a folder, with their state.

Imports no torch and hashes nothing, so it answers at once; ``rapidformer check`` verifies contents.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.checkpoint.inventory import (
    CheckpointEntry,
    Inventory,
    RunEntry,
    take_inventory,
)
from rapidformer.cli.own_flags import CommandParser, HelpShownError
from rapidformer.errors import CheckpointError
from rapidformer.hub import suggest_path
from rapidformer.strict_json import format_json

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN = 3
"""Checkpoints of each run, if there are several runs."""
_COLOURS = {
    "running": "green",
    "in progress": "green",
    "damaged": "red",
    "killed": "yellow",
    "abandoned": "yellow",
}
_NOT_VERIFIED = "Only sizes were compared: `rapidformer check` verifies the contents."


def run(argv: list[str]) -> None:
    """Print a table, or JSON."""
    try:
        options = build_parser().parse_args(argv)
    except HelpShownError:
        return
    folder = Path(options.folder).expanduser()
    if not folder.is_dir():
        reason = "is a file" if folder.exists() else "does not exist"
        hint = suggest_path(folder)
        if not argv and not hint:
            hint = " Runs are kept there by default; `rapidformer runs DIR` lists another folder."
        raise CheckpointError(f"the folder {folder} {reason}.{hint}")
    inventory = take_inventory(folder)
    if options.json:
        sys.stdout.write(format_json(_to_json(inventory), indent=1) + "\n")
    else:
        _show(inventory, shows_all=options.all)


def build_parser() -> CommandParser:
    """The command's flags."""
    parser = CommandParser(
        prog="rapidformer runs",
        description="List the runs and checkpoints in a folder, the newest first.",
        epilog=(
            "A run is running, complete, damaged (its newest checkpoint is), killed or without a "
            "checkpoint; a checkpoint is complete, damaged, in progress or abandoned. Contents are "
            "not verified: `rapidformer check` does that."
        ),
    )
    default = os.environ.get("RAPIDFORMER_RUNS") or "runs"
    parser.add_argument(
        "folder",
        nargs="?",
        default=default,
        metavar="DIR",
        help="a folder of runs, a run or a checkpoint (default: runs)",
    )
    parser.add_argument("--all", action="store_true", help="show all checkpoints of every run")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


# ---- for people ----------------------------------------------------------------------------------


def _show(inventory: Inventory, *, shows_all: bool) -> None:
    from rich.console import Console

    # A pipe has no width: there, nothing is wrapped.
    console = Console(width=None if sys.stdout.isatty() else 10_000, highlight=False)
    if not inventory.runs and not inventory.checkpoints:
        console.print(f"no runs in {inventory.folder}", markup=False, soft_wrap=True)
    else:
        console.print(_draw(inventory, shows_all or len(inventory.runs) == 1))
        console.print()
        for line in _list_problems(inventory):
            console.print(line, markup=False, soft_wrap=True)
        console.print(_NOT_VERIFIED, style="dim", markup=False)
    for line in inventory.unreadable:
        sys.stderr.write(line + "\n")


def _draw(inventory: Inventory, shows_all: bool) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run" if inventory.runs else "checkpoint", overflow="fold", min_width=14)
    for name in ("step", "loss", "metric", "size", "age"):
        # On a narrow terminal, names of runs and metrics are wrapped, never numbers.
        table.add_column(name, justify="right", no_wrap=name != "metric")
    table.add_column("state", no_wrap=True)

    def add(name: str, cells: list[str], state: str, *, is_run: bool = False) -> None:
        style = "bold" if is_run else ""
        table.add_row(Text(name, style), *cells, Text(state, _COLOURS.get(state, "")))

    for entry in inventory.checkpoints:
        add(entry.path.name, _format_checkpoint(entry, None), entry.state)
    for found in inventory.runs:
        add(_name_run(found, inventory), _format_run(found), found.state, is_run=True)
        shown = found.checkpoints if shows_all else found.checkpoints[:_SHOWN]
        for entry in shown:
            cells = _format_checkpoint(entry, found.best_metric)
            add("  " + _name_checkpoint(entry), cells, entry.state)
        if hidden := found.checkpoints[len(shown) :]:
            damaged = sum(entry.state == "damaged" for entry in hidden)
            add(f"  and {len(hidden)} more", [""] * 5, f"{damaged} damaged" if damaged else "")
    return table


def _name_run(found: RunEntry, inventory: Inventory) -> str:
    if found.path == inventory.folder:
        return found.path.resolve().name
    return str(found.path.relative_to(inventory.folder))


def _name_checkpoint(entry: CheckpointEntry) -> str:
    """Staging folders and folders of abandoned checkpoints say so in the last column."""
    return entry.path.name[entry.path.name.find("iter_") :]


def _format_run(found: RunEntry) -> list[str]:
    value = found.best_value
    best = "" if value is None else f"best {found.best_metric} {_format_number(value)}"
    return [
        _format_step(found.step), _format_number(found.loss), best, format_size(found.size),
        _format_age(found.modified),
    ]  # fmt: skip


def _format_checkpoint(entry: CheckpointEntry, metric: str | None) -> list[str]:
    name = metric if metric in entry.metrics else next(iter(entry.metrics), None)
    result = "" if name is None else f"{name} {_format_number(entry.metrics[name])}"
    return [
        _format_step(entry.step), _format_number(entry.loss), result, format_size(entry.size),
        _format_age(entry.modified),
    ]  # fmt: skip


def _format_step(step: int | None) -> str:
    return "" if step is None else str(step)


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) >= 1000 else f"{value:.4f}"


def format_size(size: float) -> str:
    """Bytes in a unit that gives a short number."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            break
        size, unit = size / 1000, {"B": "kB", "kB": "MB", "MB": "GB", "GB": "TB"}[unit]
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def _format_age(modified: float) -> str:
    seconds = max(time.time() - modified, 0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _list_problems(inventory: Inventory) -> Iterator[str]:
    entries = [*inventory.checkpoints, *(c for found in inventory.runs for c in found.checkpoints)]
    for entry in entries:
        if entry.problem is not None:
            yield f"{entry.state}: {entry.path}: {entry.problem}."


# ---- for machines --------------------------------------------------------------------------------


def _to_json(inventory: Inventory) -> dict[str, Any]:
    return {
        "folder": str(inventory.folder),
        "verified": False,
        "runs": [_run_to_json(found) for found in inventory.runs],
        "checkpoints": [_checkpoint_to_json(entry) for entry in inventory.checkpoints],
        "unreadable": inventory.unreadable,
    }


def _run_to_json(found: RunEntry) -> dict[str, Any]:
    is_evaluated = found.best_value is not None
    best = {"metric": found.best_metric, "value": found.best_value, "step": found.best_step}
    return {
        "path": str(found.path),
        "state": found.state,
        "step": found.step,
        "loss": found.loss,
        "best": best if is_evaluated else None,
        **_size_to_json(found),
        "checkpoints": [_checkpoint_to_json(entry) for entry in found.checkpoints],
    }


def _checkpoint_to_json(entry: CheckpointEntry) -> dict[str, Any]:
    return {
        "path": str(entry.path),
        "state": entry.state,
        "problem": entry.problem,
        "step": entry.step,
        "loss": entry.loss,
        "metrics": entry.metrics,
        **_size_to_json(entry),
    }


def _size_to_json(entry: RunEntry | CheckpointEntry) -> dict[str, Any]:
    return {
        "bytes": entry.size,
        "modified": entry.modified,
        "age_seconds": round(max(time.time() - entry.modified, 0), 1),
    }
