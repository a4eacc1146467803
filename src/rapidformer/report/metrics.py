"""``metrics.jsonl`` as curves, with few enough points to draw."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from rapidformer.errors import DataError
from rapidformer.strict_json import parse_json, parse_object

Line = dict[str, Any]
Points = list[tuple[float, float]]
_NOT_CURVES = ("bad_", "predicted_", "actual_", "epoch", "seconds_left")


def read_lines(metrics_file: Path) -> list[Line]:
    """The complete lines; the last one may be incomplete while the run is writing."""
    if not metrics_file.is_file():
        raise DataError(f"{metrics_file} does not exist: a run with --save writes it.")
    texts = [text for text in metrics_file.read_bytes().split(b"\n") if text.strip()]
    try:
        found = parse_json(b"[" + b",".join(texts) + b"]")  # three times as fast as one by one
    except ValueError:
        found = list(map(parse_object, texts))
    return [line for line in found if isinstance(line, dict) and is_number(line.get("step"))]


def is_number(value: object) -> bool:
    """Whether it is a number that can be drawn."""
    return type(value) in (int, float) and math.isfinite(cast("float", value))


def build_curves(lines: Iterable[Line], most: int) -> dict[str, dict[str, Any]]:
    """By name: steps ``x`` and values ``y``, as in the file, at most so many.

    Of more, the lowest and the highest of each stretch are kept, so that no peak is lost; ``mean``
    then has the middle of each stretch and its mean, which a smoothed curve must follow.
    """
    columns: dict[str, tuple[list[float], list[float]]] = {}
    for line in lines:
        step = line["step"]
        for name, value in line.items():
            if type(value) in (float, int) and name != "step":
                if name not in columns:
                    columns[name] = ([], [])
                steps, values = columns[name]
                steps.append(step)
                values.append(value)
    return {
        name: _thin(*_tidy(*column), most)
        for name, column in columns.items()
        if not name.startswith(_NOT_CURVES)
    }


def _tidy(steps: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """In the order of the steps, without what is not finite."""
    if all(map(math.isfinite, values)) and all(map(operator.le, steps, steps[1:])):
        return steps, values
    points = zip(steps, values, strict=True)
    kept = sorted(point for point in points if math.isfinite(point[1]))
    return [step for step, _ in kept], [value for _, value in kept]


def _thin(steps: list[float], values: list[float], most: int) -> dict[str, Any]:
    count = len(steps)
    if count <= most:
        return {"x": steps, "y": values}
    kept: list[int] = []
    middles, means = [], []
    stretches = max(1, most // 2)
    for number in range(stretches):
        first, last = (count * n // stretches for n in (number, number + 1))
        part = values[first:last]
        kept += sorted({first + part.index(min(part)), first + part.index(max(part))})
        middles.append(steps[(first + last) // 2])
        means.append(sum(part) / len(part))
    return {
        "x": [steps[place] for place in kept],
        "y": [values[place] for place in kept],
        "count": count,
        "mean": [middles, means],
    }


def list_evaluations(lines: Sequence[Line]) -> list[Line]:
    """The lines of evaluations and of the test, as they are."""
    return [line for line in lines if any(n.startswith(("eval_", "test_")) for n in line)]
