"""``metrics.jsonl`` as curves, with few enough points to draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rapidformer.errors import DataError
from rapidformer.strict_json import parse_json

Line = dict[str, Any]
Points = list[tuple[float, float]]
_NOT_CURVES = ("step", "epoch", "seconds_left")


def read_lines(metrics_file: Path) -> list[Line]:
    """The complete lines; the last one may be incomplete while the run is writing."""
    if not metrics_file.is_file():
        raise DataError(f"{metrics_file} does not exist: a run with --save writes it.")
    lines = []
    for text in metrics_file.read_bytes().split(b"\n"):
        try:
            line = parse_json(text)
        except ValueError:
            continue
        if isinstance(line, dict) and is_number(line.get("step")):
            lines.append(line)
    return lines


def is_number(value: object) -> bool:
    """Whether it is a number that can be drawn."""
    is_plain = isinstance(value, int | float) and not isinstance(value, bool)
    return is_plain and math.isfinite(value)


def build_curves(lines: Iterable[Line], most: int) -> dict[str, dict[str, Any]]:
    """By name: steps ``x`` and values ``y``, as in the file, at most so many.

    Of more, the lowest and the highest of each stretch are kept, so that no peak is lost; ``mean``
    then has the middle of each stretch and its mean, which a smoothed curve must follow.
    """
    points: dict[str, Points] = {}
    for line in lines:
        step = line["step"]
        for name, value in line.items():
            if name not in _NOT_CURVES and is_number(value):
                points.setdefault(name, []).append((step, value))
    return {name: _thin(sorted(found, key=_get_step), most) for name, found in points.items()}


def _get_step(point: tuple[float, float]) -> float:
    return point[0]


def _thin(points: Points, most: int) -> dict[str, Any]:
    if len(points) <= most:
        return {"x": [step for step, _ in points], "y": [value for _, value in points]}
    kept: Points = []
    means: Points = []
    stretches = max(1, most // 2)
    for number in range(stretches):
        first, last = (len(points) * n // stretches for n in (number, number + 1))
        part = points[first:last]
        values = [value for _, value in part]
        ends = {values.index(min(values)), values.index(max(values))}
        kept += [part[place] for place in sorted(ends)]
        means.append((part[len(part) // 2][0], sum(values) / len(values)))
    return {
        "x": [step for step, _ in kept],
        "y": [value for _, value in kept],
        "count": len(points),
        "mean": [list(column) for column in zip(*means, strict=True)],
    }


def list_evaluations(lines: Sequence[Line]) -> list[Line]:
    """The lines of evaluations and of the test, as they are."""
    return [line for line in lines if any(n.startswith(("eval_", "test_")) for n in line)]
