"""How the tests of data sources are asked for data, and small files to ask for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rapidformer.data.sources import load_splits

ROWS = [{"text": "a cat", "label": 0}, {"text": "NA", "label": 1}, {"text": "ä, b", "label": 0}]


def make_args(**values: Any) -> SimpleNamespace:
    defaults = {
        "data_path": None,
        "data_name": None,
        "data_dir": None,
        "train_data": None,
        "valid_data": None,
        "test_data": None,
        "cache_dir": None,
        "streaming": False,
    }
    return SimpleNamespace(**{**defaults, **values})


def load(path: Path, **values: Any) -> dict[str, Any]:
    return load_splits(make_args(data_path=[str(path)], cache_dir=str(path.parent / "c"), **values))


def as_lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
