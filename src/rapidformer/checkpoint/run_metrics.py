"""Read the losses and evaluations of a run from ``metrics.jsonl``, which may be long.

Only the lines that are needed are parsed, and a line that a crash has cut off is skipped.
"""

from __future__ import annotations

import bisect
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_STEP = re.compile(rb'"step": ?(\d{1,19})\b')
_EVALUATION = "eval_"


@dataclass(kw_only=True)
class RunMetrics:
    """What a run has logged so far."""

    step: int | None = None
    """The last step that was logged."""
    loss: float | None = None
    losses: dict[int, float] = field(default_factory=dict)
    """The last training loss that was logged up to a step."""
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    """The results of the evaluation at a step, by the metric's name."""


def read_metrics(path: Path, steps: Iterable[int]) -> RunMetrics:
    """The last loss, the loss at each of these steps, and all evaluations."""
    wanted = sorted(set(steps))
    # One line for each wanted step, and one for the end of the file.
    lines: list[bytes | None] = [None] * (len(wanted) + 1)
    metrics = RunMetrics()
    try:
        if not path.is_file():  # opening a named pipe would wait for a writer
            return metrics
        with path.open("rb") as file:
            for line in file:
                found = _STEP.search(line)
                if found is None:
                    continue
                step = int(found[1])
                if b'"eval_' in line:
                    metrics.evaluations.setdefault(step, {}).update(_read_evaluation(line))
                elif b'"loss"' in line:
                    lines[bisect.bisect_left(wanted, step)] = line
                    metrics.step = step
    except OSError:
        return metrics
    for place, kept in enumerate(lines):
        if kept is not None:
            metrics.loss = _get_number(_parse(kept), "loss")
        if place < len(wanted) and metrics.loss is not None:
            metrics.losses[wanted[place]] = metrics.loss
    return metrics


def _read_evaluation(line: bytes) -> dict[str, float]:
    content = _parse(line)
    numbers = {name: _get_number(content, name) for name in content}
    return {
        name.removeprefix(_EVALUATION): number
        for name, number in numbers.items()
        if name.startswith(_EVALUATION) and number is not None
    }


def _parse(line: bytes) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _get_number(content: dict[str, Any], name: str) -> float | None:
    value = content.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if math.isfinite(value) else None
