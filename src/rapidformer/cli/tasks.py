"""``rapidformer tasks``: the tasks and the columns that each expects."""

from __future__ import annotations

import shutil
import sys
import textwrap

from rapidformer.tasks.base import Task
from rapidformer.tasks.registry import (
    PRETRAINING,
    PRETRAINING_DESCRIPTION,
    get_task,
    is_pretraining,
    list_tasks,
)


def run(argv: list[str]) -> None:
    named = [word for word in argv if not is_pretraining(word)]
    for task in [get_task(word) for word in named] if argv else list_tasks():
        _write_task(task)
    if not argv or len(named) < len(argv):
        _write(PRETRAINING)
        _write(f"{PRETRAINING_DESCRIPTION} (see `rapidformer preprocess --help`)", "    ")


def _write_task(task: Task) -> None:
    _write(task.name)
    _write(task.description, "    ")
    _write(f"also called {', '.join(task.aliases)}" if task.aliases else "", "    ")
    for role in task.columns:
        need = "" if role.required else " (optional)"
        _write(f"{role.holds}{need}", f"    {role.name:<14}")
        _write(f"{role.flag}, or found as: {', '.join(role.candidates)}", f"    {'':<14}")
    sys.stdout.write("\n")


def _write(text: str, start: str = "") -> None:
    """Wrap a paragraph after its ``start``, as wide as the terminal."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    lines = textwrap.wrap(text, width - len(start), break_on_hyphens=False)
    for line in lines:
        sys.stdout.write(f"{start}{line}\n")
        start = " " * len(start)
