"""What an evaluation shows on the run's page: the answers to its first rows, and its tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rapidformer.log import get_logger
from rapidformer.tasks.base import IGNORED_LABEL, PreparedData, Record, Task
from rapidformer.tasks.evaluation.generating import Generation, decode_answers, generate
from rapidformer.tasks.metrics.tally import ConfusionTable, ReportTable
from rapidformer.tasks.rows.rows import get_column

_ROWS = 6
_LONGEST = 1200
"""Characters of a text."""
_SHOWN_CLASSES = 40
_NEW_TOKENS = 64
"""Of an answer at most; a row with its answer never becomes longer than it was."""


class SampleAnswers:
    """The answers to the first rows of a split, from the records that its metrics are made of."""

    def __init__(self, task: Task, prepared: PreparedData, split: str) -> None:
        self._task, self._prepared, self._split = task, prepared, split
        self._records: list[Record] = []
        self._wanted = _ROWS
        windows = prepared.extras.get("windows", {}).get(split)
        if windows is not None:  # a long row may have become several records
            self._wanted = sum(row < _ROWS for row in get_column(windows, "example"))

    def add(self, records: Sequence[Record]) -> None:
        self._records += records[: self._wanted - len(self._records)]

    def describe(self) -> list[dict[str, Any]]:
        """One dictionary per row; none if the task cannot tell."""
        try:
            answers = self._task.predictions(self._records, self._prepared, self._split)
        except Exception as reason:
            get_logger().debug("no samples for the run's page: %s", reason)
            return []
        return [{name: _shorten(value) for name, value in row.items()} for row in answers]


def generate_samples(
    model: Any, prepared: PreparedData, count: int, device: torch.device
) -> list[dict[str, Any]]:
    """The model's greedy answers to the first rows of the validation data; on every rank."""
    tokenizer: Any = prepared.processor
    rows: Any = prepared.validation
    samples: list[dict[str, Any]] = []
    if not hasattr(rows, "__len__"):  # a stream
        return samples
    for number in range(min(count, len(rows))):
        ids, labels = (list(rows[number].get(name, ())) for name in ("input_ids", "labels"))
        # A conversation up to its first answer; of text that is all trained on, one half.
        is_answer = [label != IGNORED_LABEL for label in labels]
        start = (is_answer.index(True) if any(is_answer) else 0) or max(1, len(ids) // 2)
        end = is_answer.index(False, start) if False in is_answer[start:] else len(ids)
        generation = Generation(max_new_tokens=min(_NEW_TOKENS, max(1, len(ids) - start)))
        prompt = torch.tensor([ids[:start]], device=device)
        batch = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        (answers,) = generate(model, batch, tokenizer, generation)
        samples.append({
            "prompt": _shorten(tokenizer.decode(ids[:start])),
            "generated": decode_answers(answers, tokenizer, generation)[0].strip(),
            "expected": _shorten(tokenizer.decode(ids[start:end], skip_special_tokens=True)),
        })  # fmt: skip
    return samples


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
