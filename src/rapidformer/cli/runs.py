"""``rapidformer runs``: the runs and checkpoints in a folder; without hashing, so at once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.checkpoint.inventory import CheckpointEntry, Inventory, RunEntry, take_inventory
from rapidformer.cli.own_flags import CommandParser
from rapidformer.errors import CheckpointError
from rapidformer.hub import suggest_path
from rapidformer.strict_json import format_json

if TYPE_CHECKING:
    from rich.text import Text

_NOT_VERIFIED = "Only sizes were compared: `rapidformer check` verifies the contents."
_SHOWN = 3
"""Checkpoints of each run, if there are several runs."""
_COLUMNS = ("step", "loss", "metric", "size", "age")
_DROPPED = ("size", "loss", "age")
"""Left out on a narrow terminal, in this order."""
_NARROWEST_NAME = 16
_COLOURS = {
    "running": "green", "in progress": "green", "damaged": "red", "killed": "yellow",
    "stopped": "yellow", "abandoned": "yellow",
}  # fmt: skip


def run(argv: list[str]) -> None:
    options = build_parser().parse_args(argv)
    folder = Path(options.folder).expanduser()
    if not folder.is_dir():
        reason = "is a file" if folder.exists() else "does not exist"
        hint = suggest_path(folder)
        if not argv and not hint:
            hint = " Runs are kept there by default; `rapidformer runs DIR` lists another folder."
        raise CheckpointError(f"the folder {folder} {reason}.{hint}")
    inventory = take_inventory(folder)
    if options.json:
        content = {
            "folder": str(folder), "verified": False, "unreadable": inventory.unreadable,
            "runs": list(map(_to_json, inventory.runs)),
            "checkpoints": list(map(_to_json, inventory.checkpoints)),
        }  # fmt: skip
        sys.stdout.write(format_json(content, indent=1) + "\n")
    else:
        _show(inventory, shows_all=options.all)


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="rapidformer runs",
        description="List the runs and checkpoints in a folder, the newest first.",
        epilog="A run is running, complete, stopped (before its last step), damaged (its newest "
        "checkpoint is), killed or without a checkpoint; a checkpoint is complete, damaged, in "
        "progress or abandoned. Contents are not verified: `rapidformer check` does that.",
    )
    default = os.environ.get("RAPIDFORMER_RUNS") or "runs"
    text = "a folder of runs, a run or a checkpoint (default: runs)"
    parser.add("folder", "DIR", text, nargs="?", default=default)
    parser.add("--all", "", "show all checkpoints of every run")
    parser.add("--json", "", "print everything as JSON")
    return parser


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
        runs = inventory.runs
        for entry in [*inventory.checkpoints, *(c for one in runs for c in one.checkpoints)]:
            if entry.problem is not None:
                problem = f"{entry.state}: {entry.path}: {entry.problem}."
                console.print(problem, markup=False, soft_wrap=True)
        console.print(_NOT_VERIFIED, style="dim", markup=False)
    for unreadable in inventory.unreadable:
        sys.stderr.write(unreadable + "\n")


def _to_json(entry: RunEntry | CheckpointEntry) -> dict[str, Any]:
    age = round(max(time.time() - entry.modified, 0), 1)
    content = {**vars(entry), "path": str(entry.path), "age_seconds": age}
    if isinstance(entry, RunEntry):
        content["checkpoints"] = list(map(_to_json, entry.checkpoints))
    return content


@dataclass(frozen=True)
class Row:
    """A run or a checkpoint, with its cells by column."""

    name: str
    cells: dict[str, str]
    state: str
    is_run: bool = False


def list_rows(inventory: Inventory, *, shows_all: bool) -> list[Row]:
    """Every run with its checkpoints below it: the newest ones, or all."""
    rows = [_describe_checkpoint(entry, entry.path.name) for entry in inventory.checkpoints]
    for one in inventory.runs:
        is_folder = one.path == inventory.folder
        name = one.path.resolve().name if is_folder else one.path.relative_to(inventory.folder)
        best = one.best or {}
        shown_best = f"best {best['metric']} {_format_number(best['value'])}" if best else ""
        rows.append(Row(str(name), _format_cells(one, shown_best), one.state, is_run=True))
        shown = one.checkpoints if shows_all else one.checkpoints[:_SHOWN]
        for entry in shown:
            # Staging folders and folders of abandoned checkpoints say so in the last column.
            name = "  " + entry.path.name[entry.path.name.find("iter_") :]
            rows.append(_describe_checkpoint(entry, name, best.get("metric")))
        if hidden := one.checkpoints[len(shown) :]:
            damaged = sum(entry.state == "damaged" for entry in hidden)
            state = f"{damaged} damaged" if damaged else ""
            rows.append(Row(f"  and {len(hidden)} more", {}, state))
    return rows


def draw(title: str, rows: list[Row], width: int) -> Iterator[Text]:
    """The lines of the table; a name that is too long for its column gets a line of its own."""
    from rich.cells import cell_len, set_cell_size
    from rich.text import Text

    heading = Row(title, {name: name for name in _COLUMNS}, "state")
    widths, room = _measure([heading, *rows], width)
    room = min(room, max(cell_len(row.name) for row in (heading, *rows)))

    def join(row: Row, style: str) -> Text:
        cells = "".join("  " + row.cells.get(name, "").rjust(size) for name, size in widths.items())
        state = (row.state, _COLOURS.get(row.state, ""))
        line = Text.assemble((set_cell_size(row.name, room), style), cells, "  ", state)
        line.rstrip()
        return line

    top = join(heading, "")
    top.stylize("bold")
    lines = []
    for row in rows:
        style = "bold" if row.is_run else ""
        if cell_len(row.name) > room:
            lines.append(Text(row.name, style))
            row = replace(row, name="")
        lines.append(join(row, style))
    longest = max(line.cell_len for line in (top, *lines))
    yield from (top, Text("─" * min(width, longest)), *lines)


def _measure(rows: list[Row], width: int) -> tuple[dict[str, int], int]:
    """The widths of the columns that fit next to a name and a state, and the room for names."""
    widths = {name: max(len(row.cells.get(name, "")) for row in rows) for name in _COLUMNS}
    room = width - 2 - max(len(row.state) for row in rows)
    for name in _DROPPED:
        if room - sum(size + 2 for size in widths.values()) < _NARROWEST_NAME:
            del widths[name]
    return widths, max(room - sum(size + 2 for size in widths.values()), _NARROWEST_NAME)


def _describe_checkpoint(entry: CheckpointEntry, name: str, metric: str | None = None) -> Row:
    shown = metric if metric in entry.metrics else next(iter(entry.metrics), None)
    result = "" if shown is None else f"{shown} {_format_number(entry.metrics[shown])}"
    return Row(name, _format_cells(entry, result), entry.state)


def _format_cells(entry: RunEntry | CheckpointEntry, metric: str) -> dict[str, str]:
    step = "" if entry.step is None else str(entry.step)
    if isinstance(entry, RunEntry) and entry.state in ("stopped", "killed") and entry.train_iters:
        step += f" of {entry.train_iters}"
    return {
        "step": step, "loss": _format_number(entry.loss), "metric": metric,
        "size": format_size(entry.bytes), "age": _format_age(entry.modified),
    }  # fmt: skip


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) >= 1000 else f"{value:.4f}"


def format_size(size: float) -> str:
    """Bytes in a unit that gives a short number."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    unit = units[0]
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def _format_age(modified: float) -> str:
    seconds = max(time.time() - modified, 0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"
