"""What an evaluation shows on the run's page: the answers to its first rows, and its tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rapidformer.log import get_logger
from rapidformer.tasks.base import PreparedData, Record, Task
from rapidformer.tasks.metrics.tally import ConfusionTable, ReportTable
from rapidformer.tasks.rows.rows import take_first

_ROWS = 6
_LONGEST = 1200
"""Characters of a text."""
_SHOWN_CLASSES = 40


class SampleAnswers:
    """The answers to the first rows of a split, from the records that its metrics are made of."""

    def __init__(self, task: Task, prepared: PreparedData, split: str) -> None:
        self._task, self._prepared, self._split = task, prepared, split
        self._records: list[Record] = []
        # A long row may have become several records.
        windows = prepared.extras.get("windows", {}).get(split)
        self._wanted = _ROWS if windows is None else sum(row < _ROWS for row in windows)

    def add(self, records: Sequence[Record]) -> None:
        self._records += records[: self._wanted - len(self._records)]

    def describe(self) -> list[dict[str, Any]]:
        """One dictionary per row; none if the task cannot tell."""
        extras = dict(self._prepared.extras)
        try:
            for name, most in (("rows", _ROWS), ("windows", self._wanted)):
                if name in extras:
                    extras[name] = {self._split: take_first(extras[name][self._split], most)}
            prepared = replace(self._prepared, extras=extras)
            answers = self._task.predictions(self._records, prepared, self._split)
        except Exception as reason:
            get_logger().debug("no samples for the run's page: %s", reason)
            return []
        return [{name: _shorten(value) for name, value in row.items()} for row in answers]


def _shorten(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _LONGEST:
        return value[:_LONGEST] + "..."
    if isinstance(value, dict) and all(isinstance(part, float) for part in value.values()):
        best = sorted(value, key=lambda name: -value[name])[:3]
        return ", ".join(f"{name} {value[name]:.3f}" for name in best)
    if isinstance(value, list | dict):
        return _shorten(str(value))
    return value


def describe_tables(tables: Iterable[ReportTable]) -> list[dict[str, Any]]:
    """The tables for a file; a matrix of many classes is left out."""
    return [
        {"title": table.title, "content": table.to_json()}
        for table in tables
        if not isinstance(table, ConfusionTable) or len(table.names) <= _SHOWN_CLASSES
    ]
