"""``rapidformer tasks``: the tasks and the columns that each expects."""

from __future__ import annotations

import sys

from rapidformer.tasks.registry import PRETRAINING, PRETRAINING_DESCRIPTION, list_tasks


def run(argv: list[str]) -> None:
    """Print every task."""
    for task in list_tasks():
        names = ", ".join([task.name, *(f"{alias}" for alias in task.aliases)])
        sys.stdout.write(f"{names}\n    {task.description}\n")
        for role in task.columns:
            need = "" if role.required else " (optional)"
            sys.stdout.write(f"    {role.name:<14}{role.holds}{need}\n")
            sys.stdout.write(f"    {'':<14}names tried: {', '.join(role.candidates)}\n")
        sys.stdout.write("\n")
    sys.stdout.write(f"{PRETRAINING}\n    {PRETRAINING_DESCRIPTION}\n")
