"""``rapidformer tasks``: the tasks and the columns that each expects."""

from __future__ import annotations

import shutil
import sys
import textwrap

from rapidformer.tasks.registry import PRETRAINING, PRETRAINING_DESCRIPTION, list_tasks


def run(argv: list[str]) -> None:
    """Print every task."""
    for task in list_tasks():
        _write(task.name)
        _write(task.description, "    ")
        _write(f"also called {', '.join(task.aliases)}" if task.aliases else "", "    ")
        for role in task.columns:
            need = "" if role.required else " (optional)"
            _write(f"{role.holds}{need}", f"    {role.name:<14}")
            _write(f"found as: {', '.join(role.candidates)}", f"    {'':<14}")
        sys.stdout.write("\n")
    _write(PRETRAINING)
    _write(PRETRAINING_DESCRIPTION, "    ")


def _write(text: str, start: str = "") -> None:
    """Wrap a paragraph after its ``start``, as wide as the terminal."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    lines = textwrap.wrap(text, width - len(start), break_on_hyphens=False)
    for line in lines:
        sys.stdout.write(f"{start}{line}\n")
        start = " " * len(start)
