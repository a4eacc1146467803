"""The table of ``rapidformer runs``, as wide as the terminal allows and never wrapped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rapidformer.checkpoint.inventory import CheckpointEntry, Inventory, RunEntry

if TYPE_CHECKING:
    from rich.text import Text

_SHOWN = 3
"""Checkpoints of each run, if there are several runs."""
_COLUMNS = ("step", "loss", "metric", "size", "age")
_DROPPED = ("size", "loss", "age")
"""Left out on a narrow terminal, in this order."""
_NARROWEST_NAME = 16
_COLOURS = {
    "running": "green",
    "in progress": "green",
    "damaged": "red",
    "killed": "yellow",
    "abandoned": "yellow",
}


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
    for found in inventory.runs:
        rows.append(_describe_run(found, _name_run(found, inventory)))
        shown = found.checkpoints if shows_all else found.checkpoints[:_SHOWN]
        rows += [
            _describe_checkpoint(entry, "  " + _name_checkpoint(entry), found.best_metric)
            for entry in shown
        ]
        if hidden := found.checkpoints[len(shown) :]:
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


def _name_run(found: RunEntry, inventory: Inventory) -> str:
    if found.path == inventory.folder:
        return found.path.resolve().name
    return str(found.path.relative_to(inventory.folder))


def _name_checkpoint(entry: CheckpointEntry) -> str:
    """Staging folders and folders of abandoned checkpoints say so in the last column."""
    return entry.path.name[entry.path.name.find("iter_") :]


def _describe_run(found: RunEntry, name: str) -> Row:
    value = found.best_value
    best = "" if value is None else f"best {found.best_metric} {_format_number(value)}"
    return Row(name, _format_cells(found, best), found.state, is_run=True)


def _describe_checkpoint(entry: CheckpointEntry, name: str, metric: str | None = None) -> Row:
    shown = metric if metric in entry.metrics else next(iter(entry.metrics), None)
    result = "" if shown is None else f"{shown} {_format_number(entry.metrics[shown])}"
    return Row(name, _format_cells(entry, result), entry.state)


def _format_cells(entry: RunEntry | CheckpointEntry, metric: str) -> dict[str, str]:
    return {
        "step": "" if entry.step is None else str(entry.step),
        "loss": _format_number(entry.loss),
        "metric": metric,
        "size": format_size(entry.size),
        "age": _format_age(entry.modified),
    }


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
