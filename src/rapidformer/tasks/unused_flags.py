"""Flags that a task does not read: given by mistake, and worth a warning.

The help text of a flag names its tasks (``question_answering: overlap in tokens ...``); flags for
columns belong to the tasks that look for such a column.
"""

from __future__ import annotations

import re

from rapidformer.config import Settings
from rapidformer.config.schema import Setting, get_settings
from rapidformer.tasks.base import Task

_TASKS = re.compile(r"(\w+_\w+(?:, \w+_\w+)*): ")


def describe_unused_flags(args: Settings, task: Task) -> str | None:
    """One sentence about every flag that the user gave and the task does not read."""
    unused = [
        setting.flag
        for setting in get_settings().values()
        if args.is_given(setting.name) and not _is_read(setting, task)
    ]
    return f"no effect on --task {task.name}: {', '.join(unused)}." if unused else None


def _is_read(setting: Setting, task: Task) -> bool:
    named = _TASKS.match(setting.help)
    if named is not None:
        return task.name in named.group(1).split(", ")
    if setting.name.endswith(("_column", "_columns")) and setting.name != "length_column":
        return setting.name in {role.setting for role in task.columns}
    return True
