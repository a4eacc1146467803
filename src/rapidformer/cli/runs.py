"""``rapidformer runs``: the runs and checkpoints in a folder, with their state.

Imports no torch and hashes nothing, so it answers at once; ``rapidformer check`` verifies contents.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rapidformer.checkpoint.inventory import (
    CheckpointEntry,
    Inventory,
    RunEntry,
    take_inventory,
)
from rapidformer.cli.own_flags import CommandParser, HelpShownError
from rapidformer.cli.run_table import draw, list_rows
from rapidformer.errors import CheckpointError
from rapidformer.hub import suggest_path
from rapidformer.strict_json import format_json

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

    # A pipe has no width: there, nothing is shortened.
    console = Console(width=None if sys.stdout.isatty() else 10_000, highlight=False)
    if not inventory.runs and not inventory.checkpoints:
        console.print(f"no runs in {inventory.folder}", markup=False, soft_wrap=True)
    else:
        rows = list_rows(inventory, shows_all=shows_all or len(inventory.runs) == 1)
        for line in draw("run" if inventory.runs else "checkpoint", rows, console.width):
            console.print(line, soft_wrap=True)
        console.print()
        for problem in _list_problems(inventory):
            console.print(problem, markup=False, soft_wrap=True)
        console.print(_NOT_VERIFIED, style="dim", markup=False)
    for unreadable in inventory.unreadable:
        sys.stderr.write(unreadable + "\n")


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
