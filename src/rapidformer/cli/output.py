"""Write predictions to a file, in the format that its name implies."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def write_predictions(rows: list[Row], path: Path) -> None:
    """JSON lines, unless the name ends in .json, .csv, .tsv or .parquet."""
    kind = path.suffix.lower()
    if kind == ".parquet":
        _write_parquet(rows, path)
        return
    formats: dict[str, Callable[[list[Row]], str]] = {
        ".json": lambda rows: json.dumps(rows, indent=1, ensure_ascii=False) + "\n",
        ".csv": lambda rows: _format_table(rows, ","),
        ".tsv": lambda rows: _format_table(rows, "\t"),
    }
    path.write_text(formats.get(kind, format_lines)(rows), encoding="utf-8")


def format_lines(rows: list[Row]) -> str:
    """One JSON object per line."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _format_table(rows: list[Row], separator: str) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names, delimiter=separator, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _to_cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _to_cell(value: Any) -> Any:
    """Tables cannot hold lists and objects: write them as JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value


def _write_parquet(rows: list[Row], path: Path) -> None:
    from rapidformer.data.files import import_datasets

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names}
    import_datasets().Dataset.from_dict(columns).to_parquet(str(path))
