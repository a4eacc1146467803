"""Flags that a task does not read: given by mistake, and worth a warning.

A setting says which tasks it is for (``config/sections.py``), and a task which columns it looks
for.
"""

from __future__ import annotations

from rapidformer.config import Settings
from rapidformer.config.schema import Setting, get_settings
from rapidformer.tasks.base import Task
from rapidformer.tasks.registry import list_tasks


def describe_unused_flags(args: Settings, task: Task) -> str | None:
    """One sentence about every flag that the user gave and the task does not read."""
    unused = [
        setting.flag
        for setting in get_settings().values()
        if args.is_changed(setting.name) and not _is_read(setting, task)
    ]
    return f"no effect with --task {task.name}: {', '.join(unused)}." if unused else None


def _is_read(setting: Setting, task: Task) -> bool:
    if setting.tasks:
        return task.name in setting.tasks
    names_a_column = any(_looks_for(each, setting) for each in list_tasks())
    return not names_a_column or _looks_for(task, setting)


def _looks_for(task: Task, setting: Setting) -> bool:
    return any(role.setting == setting.name for role in task.columns)
