"""The table that ``rapidformer verify`` prints."""

from __future__ import annotations


def read_table(out: str) -> dict[str, str]:
    lines = out.strip().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("quantity"))
    return {line[: lines[start].index("worst")].strip(): line for line in lines[start + 1 :]}
